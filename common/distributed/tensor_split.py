"""How the ranks of an axis hold one tensor together: which rows of it each has, and the way to the whole and back."""

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
class Split:
    """One tensor, of which each rank has rows along one dimension.

    A tensor of several sections (rows of queries, keys and values in one weight) has, on each rank, its rows of every
    section, so that they are pieces that lie apart in the whole.

    A tensor may be padded, so that the ranks divide it (a vocabulary). Then a checkpoint has the rows that mean
    something, and another number of ranks pads them anew.

    Attributes:
        full_shape: of the whole tensor, padding included.
        dim: the dimension along which it is split.
        pieces: of each rank: first row and row behind the last of its pieces, in their order on that rank.
        index: this rank's place among them.
        kept: rows of the whole that mean something, the first ones; what is behind them is zero in all that is loaded.
            None for all.

    Raises:
        ValueError: the pieces are not all rows once, the ranks have different numbers of rows, or more rows are kept
            than there are.
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
    def dealt(
        cls,
        full_shape: Sequence[int],
        dim: int,
        sections: Sequence[int],
        ranks: int,
        index: int,
        kept: int | None = None,
    ) -> Split:
        """Every section dealt to the ranks in equal parts, the first rank first.

        Args:
            full_shape, dim, index, kept: see the class.
            sections: rows of each along ``dim``, in their order.
            ranks: how many share.

        Raises:
            ConfigError: the ranks do not divide a section.
            ValueError: the sections are not all rows.
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
    ) -> Split:
        """:meth:`dealt` to the ranks of ``tp``; without ``sections`` there is one."""
        sections = sections or (full_shape[dim],)
        return cls.dealt(full_shape, dim, sections, layout.size("tp"), layout.coordinate("tp"), kept)

    @property
    def ranks(self) -> int:
        """How many hold the tensor."""
        return len(self.pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what one rank has."""
        shape = list(self.full_shape)
        shape[self.dim] //= self.ranks
        return tuple(shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the whole tensor without its padding."""
        shape = list(self.full_shape)
        shape[self.dim] = shape[self.dim] if self.kept is None else self.kept
        return tuple(shape)

    def without_padding(self, full: Tensor) -> Tensor:
        """A view of what means something in ``full``, of ``full_shape``."""
        return full if self.kept is None else full.narrow(self.dim, 0, self.kept)

    def padded(self, kept: Tensor) -> Tensor:
        """``kept``, of ``kept_shape``, with zeros behind it: of ``full_shape``."""
        if self.kept_shape == self.full_shape:
            return kept
        full = kept.new_zeros(self.full_shape)
        self.without_padding(full).copy_(kept)
        return full

    def local_of(self, full: Tensor) -> Tensor:
        """What this rank has of ``full``, of ``full_shape``: a tensor of its own, of ``local_shape``.

        Raises:
            ValueError: the tensor has another shape.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"a tensor {tuple(full.shape)} where {self.full_shape} is split")
        own = self.pieces[self.index]
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in own], self.dim)

    def full_of(self, locals: Sequence[Tensor]) -> Tensor:
        """The whole, of ``full_shape``, from what every rank has, in their order.

        Raises:
            ValueError: not one tensor of the right shape for every rank.
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
        """The whole on ``device``, bit for bit; collective over ``group``, the ranks that hold it.

        Args:
            local: what this rank has, anywhere.
            group: None where it is this rank alone.
            device: that the group communicates on.
        """
        if group is None:
            return self.full_of([local.detach().to(device)])
        # As bytes, which every backend carries for every dtype.
        mine = local.detach().to(device).contiguous().flatten().view(torch.uint8)
        everyone = torch.empty(self.ranks * mine.numel(), dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(everyone, mine, group=group)
        return self.full_of([piece.view(local.dtype).view(self.local_shape) for piece in everyone.chunk(self.ranks)])


def check_splits(splits: Mapping[str, Split], tensors: Mapping[str, Tensor]) -> None:
    """Make sure that each split is one of a tensor as this rank has it.

    Raises:
        ValueError: there is no tensor of that name, or it has another shape.
    """
    for name, split in splits.items():
        if name not in tensors:
            raise ValueError(f"{name!r} is said to be split over tp, but the model has no such tensor")
        if tuple(tensors[name].shape) != split.local_shape:
            raise ValueError(
                f"{name!r} is said to be split over tp into {split.local_shape}; this rank has "
                f"{tuple(tensors[name].shape)}"
            )


def gathered(
    state: Any,
    splits: Mapping[str, Split],
    group: dist.ProcessGroup | None,
    layout: Layout,
    destination: torch.device | str = "cpu",
) -> Any:
    """A nest of mappings and sequences with whole tensors, without padding, under the names of ``splits``.

    Collective over ``group``, whose ranks have the same nest.

    Args:
        state: tensors by name, at any depth; under the name of a split one they have its local shape.
        splits: by name.
        group: the ranks that hold each of the split tensors together; None for this rank alone.
        layout: whose device the group communicates on.
        destination: where whole tensors are wanted.

    Raises:
        ValueError: a tensor under the name of a split one has another shape.
    """

    def whole(name: str, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != splits[name].local_shape:
            raise ValueError(f"{name!r}: {tuple(tensor.shape)} where {splits[name].local_shape} are split over tp")
        # The group's backend may know the device alone; what stays there is one tensor at a time.
        split = splits[name]
        return split.without_padding(split.gather(tensor, group, layout.device)).to(destination)

    return _replaced(state, splits, whole)


def without_padding(tensors: Mapping[str, Tensor], splits: Mapping[str, Split]) -> dict[str, Tensor]:
    """What :func:`gathered` gives where this rank alone holds the tensors, which are not copied."""
    return {name: splits[name].without_padding(t) if name in splits else t for name, t in tensors.items()}


def own_parts(state: Any, splits: Mapping[str, Split]) -> Any:
    """The inverse of :func:`gathered`: the nest with what this rank has of the tensors under the names of ``splits``.

    Raises:
        CheckpointError: a tensor has another shape than the whole.
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


def _replaced(state: Any, splits: Mapping[str, Split], function: Any) -> Any:
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
