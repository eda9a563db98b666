"""Split of one tensor over the ranks of an axis: the rows of each rank, and conversion from and to whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class TensorSplit:
    """Split of one tensor; each rank holds some rows along one dimension.

    If the tensor consists of several sections (such as query, key and value rows of one weight), each rank holds rows
    of every section. These pieces are not adjacent in the whole tensor.

    The tensor may be padded (such as a vocabulary) so that the number of ranks divides it. Checkpoints store it
    without the padding, so they load with any number of ranks.

    Attributes:
        full_shape: shape of the whole tensor, including padding.
        pieces: for each rank, (start, stop) rows of its pieces, in their order on that rank.
        kept: number of leading rows that are not padding; None for all. Loading sets the padding to zero.

    Raises:
        ValueError: the pieces do not cover every row exactly once, the ranks have different numbers of rows, or an
            index, the dimension or ``kept`` is out of range.
    """

    full_shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    index: int
    kept: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.full_shape) or not 0 <= self.index < len(self.pieces):
            raise ValueError(f"{self.full_shape} has no dimension {self.dim}, or {self.ranks} ranks no {self.index}")
        every = sorted(itertools.chain.from_iterable(self.pieces))
        ends = [0, *(stop for _, stop in every)]
        if [start for start, _ in every] != ends[:-1] or ends[-1] != self.full_shape[self.dim]:
            raise ValueError(f"pieces {self.pieces} are not all {self.full_shape[self.dim]} rows once")
        if len({sum(stop - start for start, stop in own) for own in self.pieces}) != 1:
            raise ValueError(f"the ranks of pieces {self.pieces} have different numbers of rows")
        if self.kept is not None and not 0 < self.kept <= self.full_shape[self.dim]:
            raise ValueError(f"{self.kept} rows of {self.full_shape[self.dim]} cannot be kept")

    @classmethod
    def sharded(
        cls,
        full_shape: Sequence[int],
        dim: int,
        sections: Sequence[int],
        ranks: int,
        index: int,
        kept: int | None = None,
    ) -> TensorSplit:
        """Return a split in which every section is sharded into equal parts, in rank order.

        Args:
            sections: number of rows of each section along ``dim``, in order.

        Raises:
            ConfigError: the number of ranks does not divide a section.
            ValueError: the sections do not add up to all rows.
        """
        start = 0
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for rows in sections:
            if rows % ranks:
                raise ConfigError(
                    f"layout.tp={ranks} does not divide {rows}, a part of dimension {dim} of a tensor "
                    f"{tuple(full_shape)}: choose a tp that does"
                )
            for rank, own in enumerate(pieces):
                own.append((start + rank * rows // ranks, start + (rank + 1) * rows // ranks))
            start += rows
        return cls(tuple(full_shape), dim, tuple(tuple(own) for own in pieces), index, kept)

    @classmethod
    def over_tp(
        cls,
        layout: Layout,
        full_shape: Sequence[int],
        dim: int = 0,
        sections: Sequence[int] | None = None,
        kept: int | None = None,
    ) -> TensorSplit:
        """Return :meth:`sharded` over the ranks of ``tp``.

        Args:
            sections: see :meth:`sharded`; None for a single section.
        """
        sections = sections or (full_shape[dim],)
        return cls.sharded(full_shape, dim, sections, layout.size("tp"), layout.coordinate("tp"), kept)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the part on one rank."""
        shape = list(self.full_shape)
        shape[self.dim] //= self.ranks
        return tuple(shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor without padding."""
        shape = list(self.full_shape)
        shape[self.dim] = shape[self.dim] if self.kept is None else self.kept
        return tuple(shape)

    def without_padding(self, full: Tensor) -> Tensor:
        """Return a view of ``full`` (of ``full_shape``) without its padding."""
        return full if self.kept is None else full.narrow(self.dim, 0, self.kept)

    def padded(self, kept: Tensor) -> Tensor:
        """Return ``kept`` (of ``kept_shape``) padded with zeros to ``full_shape``."""
        if self.kept_shape == self.full_shape:
            return kept
        full = kept.new_zeros(self.full_shape)
        self.without_padding(full).copy_(kept)
        return full

    def local_of(self, full: Tensor) -> Tensor:
        """Return a copy of this rank's part of ``full``, of ``local_shape``.

        Raises:
            ValueError: the shape of ``full`` is not ``full_shape``.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"a tensor {tuple(full.shape)} where {self.full_shape} is split")
        own = self.pieces[self.index]
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in own], self.dim)

    def full_of(self, locals: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, of ``full_shape``, from the parts of all ranks in rank order.

        Raises:
            ValueError: the number of tensors or a shape is wrong.
        """
        shapes = [tuple(tensor.shape) for tensor in locals]
        if shapes != [self.local_shape] * self.ranks:
            raise ValueError(f"tensors {shapes} where {self.ranks} of {self.local_shape} make one")
        full = locals[0].new_empty(self.full_shape)
        for own, local in zip(self.pieces, locals, strict=True):
            parts = local.split([stop - start for start, stop in own], self.dim)
            for (start, stop), part in zip(own, parts, strict=True):
                full.narrow(self.dim, start, stop - start).copy_(part)
        return full

    def gather(self, local: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
        """Return the whole tensor on ``device``, bit for bit. Collective over ``group``.

        Args:
            local: part of this rank, on any device.
            group: process group of the split's ranks; None if it is this rank alone.
            device: device that the group communicates on.
        """
        if group is None:
            return self.full_of([local.detach().to(device)])
        # Send bytes, because not every backend supports every dtype.
        mine = local.detach().to(device).contiguous().flatten().view(torch.uint8)
        everyone = torch.empty(self.ranks * mine.numel(), dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(everyone, mine, group=group)
        return self.full_of([piece.view(local.dtype).view(self.local_shape) for piece in everyone.chunk(self.ranks)])


def check_splits(splits: Mapping[str, TensorSplit], tensors: Mapping[str, Tensor]) -> None:
    """Check that each split matches a tensor of this rank.

    Raises:
        ValueError: a tensor is missing or its shape differs from the split's local shape.
    """
    for name, split in splits.items():
        if name not in tensors:
            raise ValueError(f"{name!r} is declared as split over tp, but the model has no such tensor")
        if tuple(tensors[name].shape) != split.local_shape:
            raise ValueError(
                f"{name!r} is declared as split over tp into {split.local_shape}; this rank has "
                f"{tuple(tensors[name].shape)}"
            )


def gathered(
    state: Any,
    splits: Mapping[str, TensorSplit],
    group: dist.ProcessGroup | None,
    layout: Layout,
    destination: torch.device | str = "cpu",
) -> Any:
    """Return a copy of ``state`` in which the tensors named in ``splits`` are whole, without padding.

    Collective over ``group``; all its ranks must pass the same structure.

    Args:
        state: nested mappings and sequences; a tensor under a name of ``splits``, at any depth, has the local shape.
        group: process group of the splits' ranks; None for this rank alone.
        layout: layout of the ranks; the group communicates on its device.

    Raises:
        ValueError: a tensor named in ``splits`` does not have the local shape.
    """

    def whole(name: str, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != splits[name].local_shape:
            raise ValueError(f"{name!r}: {tuple(tensor.shape)} where {splits[name].local_shape} are split over tp")
        # Gather on the device, which the backend may require; only one whole tensor at a time occupies its memory.
        split = splits[name]
        return split.without_padding(split.gather(tensor, group, layout.device)).to(destination)

    return _replaced(state, splits, whole)


def without_padding(tensors: Mapping[str, Tensor], splits: Mapping[str, TensorSplit]) -> dict[str, Tensor]:
    """Return tensors by name without the padding of ``splits``, as views: :func:`gathered` for a single rank."""
    return {name: splits[name].without_padding(t) if name in splits else t for name, t in tensors.items()}


def own_parts(state: Any, splits: Mapping[str, TensorSplit]) -> Any:
    """Return a copy of ``state`` with this rank's parts of the tensors in ``splits``; inverts :func:`gathered`.

    Raises:
        CheckpointError: the shape of a tensor differs from the whole tensor without padding.
    """

    def own(name: str, tensor: Tensor) -> Tensor:
        split = splits[name]
        if tuple(tensor.shape) != split.kept_shape:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} has the shape {tuple(tensor.shape)}, "
                f"{split.kept_shape} are expected"
            )
        return split.local_of(split.padded(tensor))

    return _replaced(state, splits, own)


def _replaced(state: Any, splits: Mapping[str, TensorSplit], function: Any) -> Any:
    if isinstance(state, Mapping):
        return {
            name: function(name, value)
            if name in splits and isinstance(value, Tensor)
            else _replaced(value, splits, function)
            for name, value in state.items()
        }
    if isinstance(state, list | tuple):
        return [_replaced(value, splits, function) for value in state]
    return state
