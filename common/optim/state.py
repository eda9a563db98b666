"""Optimizer state as full tensors by parameter name, independent of ranks, shards and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError
from common.optim.buffers import Bucket, FlatBuffer, Segment

Kinds = Mapping[str, Sequence[Tensor]]
"""Kind of state to one flat tensor per buffer, in the layout of its shard."""

Named = dict[str, dict[str, Tensor]]
"""Kind of state to parameter name to full tensor."""


def collect(
    buffers: Sequence[FlatBuffer], kinds: Kinds, group: dist.ProcessGroup | None, ranks: int, keep: bool
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
        for buffer, flat in zip(buffers, flats, strict=True):
            if kind == "masters" and not buffer.shard.has_masters:
                continue
            for bucket in buffer.buckets:
                part = bucket.in_shard
                own = buffer.shard.read_masters(part) if kind == "masters" else flat[part]
                whole = own
                if group is not None:
                    whole = torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device)
                    dist.all_gather_into_tensor(whole, own, group=group)
                if keep:
                    for name, view in _views(buffer, bucket, whole):
                        copy = torch.empty_like(view, device="cpu").copy_(view)
                        found.setdefault(kind, {})[name] = copy
    return found


def distribute(buffers: Sequence[FlatBuffer], kinds: Kinds, named: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy this rank's pieces of full tensors into its flat tensors; the inverse of :func:`collect`.

    Half-precision parameters, in the model and in the shard, are set to their rounded masters. Other parameters are
    taken from the model.

    Args:
        kinds: flat tensors that are written, as in :func:`collect`.
    """
    for kind, flats in kinds.items():
        for buffer, flat in zip(buffers, flats, strict=True):
            if kind == "masters" and not buffer.shard.has_masters:
                continue
            for bucket in buffer.buckets:
                whole = _assemble(buffer, bucket, named[kind])
                own = whole[bucket.own.start - bucket.start : bucket.own.stop - bucket.start]
                if kind == "masters":
                    buffer.shard.write_masters(bucket.in_shard, own)
                    if not buffer.is_whole:  # else the shard's parameters are those of the buffer
                        buffer.shard.write_parameters(buffer.parameters[bucket.start : bucket.stop], whole)
                else:
                    flat[bucket.in_shard].copy_(own)
    for buffer in buffers:
        if not buffer.is_whole:
            buffer.take(buffer.parameters, buffer.shard.parameters)


def put(buffers: Sequence[FlatBuffer], kinds: Kinds, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Set one parameter and its state from full tensors, as :func:`distribute` does for all of them.

    Args:
        kinds: the state, always with ``masters``. Setting the master of an fp32 or fp64 parameter sets the parameter.
        tensors: for every kind a tensor of the parameter's shape, on any device and in any floating dtype.

    Raises:
        CheckpointError: there is no such parameter, a kind is missing or unknown, or a tensor has another shape.
    """
    number, bucket, segment = _find(buffers, name)
    buffer, shape = buffers[number], segment.parameter.shape
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
    shard, end = buffer.shard, segment.start + segment.numel
    first, stop = max(segment.start, bucket.own.start), min(end, bucket.own.stop)
    own, shift = slice(first - segment.start, stop - segment.start), bucket.in_shard.start - bucket.own.start
    for kind, tensor in tensors.items():
        flat = _flat(tensor.detach().to(shard.parameters.device, shard.master_dtype), segment)
        if kind == "masters" and not buffer.is_whole:  # else the shard's parameters are those of the buffer
            shard.write_parameters(buffer.parameters[segment.start : end], flat)
        if first < stop:
            part = slice(first + shift, stop + shift)
            if kind == "masters":
                shard.write_masters(part, flat[own])
            else:
                kinds[kind][number][part].copy_(flat[own])


def check(buffers: Sequence[FlatBuffer], kinds: Kinds, named: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that ``named`` has the entries and shapes that :func:`collect` returns for these parameters.

    Raises:
        CheckpointError: an entry is missing, unexpected, or has another shape.
    """
    expected: dict[str, torch.Size] = {}
    for kind in kinds:
        for buffer in buffers:
            if kind == "masters" and not buffer.shard.has_masters:
                continue
            expected.update({f"{kind}.{s.name}": s.parameter.shape for s in buffer.segments})
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
    listed = [
        f"{what}: {', '.join(entries[:5])}{f' and {len(entries) - 5} more' if len(entries) > 5 else ''}"
        for what, entries in problems.items()
        if entries
    ]
    if listed:
        raise CheckpointError(f"the optimizer's state does not fit the model: {'; '.join(listed)}")


def _flat(tensor: Tensor, segment: Segment) -> Tensor:
    """Return the values of ``tensor`` as 1-d, in the order in which the parameter's elements are in memory."""
    if segment.parameter.is_contiguous():
        return tensor.reshape(-1)
    flat = torch.empty_like(segment.parameter, dtype=tensor.dtype).copy_(tensor)
    return flat.as_strided((segment.numel,), (1,))


def _find(buffers: Sequence[FlatBuffer], name: str) -> tuple[int, Bucket, Segment]:
    """Return the index of the parameter's buffer, its bucket, and its segment."""
    for number, buffer in enumerate(buffers):
        for bucket in buffer.buckets:
            for segment in bucket.segments:
                if segment.name == name:
                    return number, bucket, segment
    raise CheckpointError(f"the optimizer has no parameter {name!r}")


def _views(buffer: FlatBuffer, bucket: Bucket, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each parameter in ``whole``, the content of a bucket; views have parameter shapes."""
    # as_strided counts offsets from the start of the storage, which is not the start of a slice.
    first = bucket.start - int(whole.storage_offset())
    for segment in bucket.segments:
        yield segment.name, buffer.view(whole, segment, first)


def _assemble(buffer: FlatBuffer, bucket: Bucket, entries: Mapping[str, Tensor]) -> Tensor:
    shard = buffer.shard
    whole = torch.zeros(bucket.stop - bucket.start, dtype=shard.master_dtype, device=shard.parameters.device)
    for name, view in _views(buffer, bucket, whole):
        view.copy_(entries[name])
    return whole
