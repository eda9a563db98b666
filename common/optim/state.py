"""Optimizer state as full tensors by parameter name, independent of ranks, shards and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError
from common.optim.flat import Bucket, Segment
from common.optim.partition import Partition, Piece

Kinds = Mapping[str, Sequence[Tensor]]
"""Kind of state to one flat tensor per partition, in the layout of its shard."""

Named = dict[str, dict[str, Tensor]]
"""Kind of state to parameter name to full tensor."""


def collect(
    partitions: Sequence[Partition], kinds: Kinds, group: dist.ProcessGroup | None, ranks: int, keep: bool
) -> Named:
    """Return full tensors on the CPU, gathered bucket by bucket. Collective over ``group``.

    Args:
        kinds: the state. Masters of fp32 and fp64 parameters are left out.
        group: ranks that share the shards.
        ranks: number of these ranks.
        keep: whether this rank needs the tensors. Other ranks only send their pieces.
    """
    found: Named = {}
    for kind, flats in kinds.items():
        for partition, flat in zip(partitions, flats, strict=True):
            if kind == "masters" and not partition.shard.has_masters:
                continue
            for piece in partition.pieces:
                own = partition.shard.read_masters(piece.place) if kind == "masters" else flat[piece.place]
                whole = own
                if group is not None:
                    whole = torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device)
                    dist.all_gather_into_tensor(whole, own, group=group)
                if keep:
                    for name, view in _views(partition, piece.bucket, whole):
                        copy = torch.empty_like(view, device="cpu").copy_(view)
                        found.setdefault(kind, {})[name] = copy
    return found


def distribute(partitions: Sequence[Partition], kinds: Kinds, named: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy this rank's pieces of full tensors into its flat tensors; the inverse of :func:`collect`.

    Half-precision parameters, in the model and in the shard, are set to their rounded masters. Other parameters are
    taken from the model.

    Args:
        kinds: flat tensors that are written, as in :func:`collect`.
        named: result of :func:`collect`.
    """
    for kind, flats in kinds.items():
        for partition, flat in zip(partitions, flats, strict=True):
            if kind == "masters" and not partition.shard.has_masters:
                continue
            for piece in partition.pieces:
                whole = _assemble(partition, piece.bucket, named[kind])
                if kind == "masters":
                    shard, bucket = partition.shard, piece.bucket
                    shard.write_masters(piece.place, _own(whole, piece))
                    if partition.is_whole:
                        continue  # the shard's parameters are those of the buffer
                    shard.write_parameters(partition.buffer.parameters[bucket.start : bucket.stop], whole)
                else:
                    flat[piece.place].copy_(_own(whole, piece))
    for partition in partitions:
        if not partition.is_whole:
            partition.take(partition.buffer.parameters, partition.shard.parameters)


def put(partitions: Sequence[Partition], kinds: Kinds, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Set one parameter and its state from full tensors, as :func:`distribute` does for all of them.

    Args:
        kinds: the state, always with ``masters``. Setting the master of an fp32 or fp64 parameter sets the parameter.
        name: name of the parameter.
        tensors: for every kind a tensor of the parameter's shape, on any device and in any floating dtype.

    Raises:
        CheckpointError: there is no such parameter, a kind is missing or unknown, or a tensor has another shape.
    """
    number, piece, segment = _place(partitions, name)
    partition, shape = partitions[number], segment.parameter.shape
    complain(
        {
            f"missing for {name}": [kind for kind in kinds if kind not in tensors],
            f"unexpected for {name}": [kind for kind in tensors if kind not in kinds],
            "of another shape": [
                f"{kind}.{name} {tuple(tensor.shape)} instead of {tuple(shape)}"
                for kind, tensor in tensors.items()
                if tensor.shape != shape
            ],
        }
    )
    shard, end = partition.shard, segment.start + segment.numel
    first, stop = max(segment.start, piece.inside.start), min(end, piece.inside.stop)
    own, shift = slice(first - segment.start, stop - segment.start), piece.place.start - piece.inside.start
    for kind, tensor in tensors.items():
        flat = _flat(tensor.detach().to(shard.parameters.device, shard.wide), segment)
        if kind == "masters" and not partition.is_whole:  # else the shard's parameters are those of the buffer
            shard.write_parameters(partition.buffer.parameters[segment.start : end], flat)
        if first < stop:
            place = slice(first + shift, stop + shift)
            if kind == "masters":
                shard.write_masters(place, flat[own])
            else:
                kinds[kind][number][place].copy_(flat[own])


def check(partitions: Sequence[Partition], kinds: Kinds, named: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that ``named`` has the entries and shapes that :func:`collect` returns for these parameters.

    Raises:
        CheckpointError: an entry is missing, unexpected, or has another shape.
    """
    expected: dict[str, torch.Size] = {}
    for kind in kinds:
        for partition in partitions:
            if kind == "masters" and not partition.shard.has_masters:
                continue
            expected.update({f"{kind}.{s.name}": s.parameter.shape for s in partition.buffer.segments})
    loaded = {
        f"{kind}.{name}": tensor.shape
        for kind, entries in named.items()
        for name, tensor in entries.items()
        if isinstance(tensor, Tensor)  # a damaged file may contain any type
    }
    complain(
        {
            "missing": [name for name in expected if name not in loaded],
            "unexpected": [name for name in loaded if name not in expected],
            "of another shape": [
                f"{name} {tuple(loaded[name])} instead of {tuple(shape)}"
                for name, shape in expected.items()
                if name in loaded and loaded[name] != shape
            ],
        }
    )


def complain(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise one error that lists all entries that do not fit, by problem; do nothing if there are none.

    Raises:
        CheckpointError: there are such entries.
    """
    told = [
        f"{what}: {', '.join(entries[:5])}{f' and {len(entries) - 5} more' if len(entries) > 5 else ''}"
        for what, entries in problems.items()
        if entries
    ]
    if told:
        raise CheckpointError(f"the optimizer's state does not fit the model: {'; '.join(told)}")


def _flat(tensor: Tensor, segment: Segment) -> Tensor:
    """Return the values of ``tensor`` as 1-d, in the order in which the parameter's elements are in memory."""
    if segment.parameter.is_contiguous():
        return tensor.reshape(-1)
    flat = torch.empty_like(segment.parameter, dtype=tensor.dtype).copy_(tensor)
    return flat.as_strided((segment.numel,), (1,))


def _place(partitions: Sequence[Partition], name: str) -> tuple[int, Piece, Segment]:
    """Return the index of the parameter's partition, this rank's piece of its bucket, and its segment."""
    for number, partition in enumerate(partitions):
        for piece in partition.pieces:
            for segment in piece.bucket.segments:
                if segment.name == name:
                    return number, piece, segment
    raise CheckpointError(f"the optimizer has no parameter {name!r}")


def _views(partition: Partition, bucket: Bucket, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each parameter in ``whole``, the content of a bucket; views have parameter shapes."""
    # as_strided counts offsets from the start of the storage, which is not the start of a slice.
    first = bucket.start - int(whole.storage_offset())
    for segment in bucket.segments:
        yield segment.name, partition.buffer.view(whole, segment, first)


def _assemble(partition: Partition, bucket: Bucket, entries: Mapping[str, Tensor]) -> Tensor:
    shard = partition.shard
    whole = torch.zeros(bucket.stop - bucket.start, dtype=shard.wide, device=shard.parameters.device)
    for name, view in _views(partition, bucket, whole):
        view.copy_(entries[name])
    return whole


def _own(whole: Tensor, piece: Piece) -> Tensor:
    return whole[piece.inside.start - piece.bucket.start : piece.inside.stop - piece.bucket.start]
