"""Layout of the ranks: named axes, process groups over the axes, and random generators.

Workloads ask the Layout instead of computing with the world size. The axes are, outermost first, ``pp`` (pipeline
stages), ``dp`` (data-parallel replicas), ``cp`` (one sample split over ranks: a sequence, a volume, or an alignment
with its pairs) and ``tp`` (one layer split over ranks).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from common.config.system import Ctas
from common.distributed import groups
from common.distributed.groups import NCCLS_OWN, in_words, of_axes, of_links
from common.distributed.rank_info import RoleName
from common.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp")


class Layout:
    """Axes of the ranks of one role, and this rank's coordinates on them.

    Args:
        sizes: size of each axis of ``AXES``; a missing axis has size 1.
        rank: rank of this process in the role, 0 <= rank < product of the sizes.
        device: device that this rank computes on.
        seed: seed of the run; generators derive from it.
        ctas: NCCL options of the communicators by axis (:mod:`common.distributed.groups`).

    Raises:
        ConfigError: an axis is unknown or its size is not positive, or the rank is out of range.
    """

    def __init__(
        self,
        sizes: Mapping[str, int] | None = None,
        rank: int = 0,
        device: torch.device | str = "cpu",
        seed: int = 0,
        role: RoleName = "train",
        ctas: Mapping[str, Ctas] | None = None,
    ) -> None:
        sizes = dict(sizes or {})
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise ConfigError(f"layout: unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
        self.sizes = {axis: int(sizes.get(axis, 1)) for axis in AXES}
        for axis, size in self.sizes.items():
            if size < 1:
                raise ConfigError(f"layout.{axis}={size}: an axis has a positive size")
        self.world_size = math.prod(self.sizes.values())
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} lies outside a layout of {self.world_size} ranks")
        self.rank = rank
        self.device = torch.device(device)
        self.seed = seed
        self.role = role
        self._ctas = dict(ctas or {})
        self._links: dict[tuple[str, str, bool], dict[int, dist.ProcessGroup]] = {}
        self._groups: dict[tuple[Ctas, tuple[tuple[int, ...], ...], str], dist.ProcessGroup | None] = {}

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of ``axes``."""
        return math.prod(self.sizes[axis] for axis in axes)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on ``axis``."""
        return self._coordinates(self.rank)[axis]

    def index(self, *axes: str) -> int:
        """Return this rank's index in the group over ``axes``; the first axis in ``AXES`` order varies slowest."""
        return self._along(axes, self._coordinates(self.rank))

    def group(self, *axes: str, ends: Sequence[str] = (), purpose: str = "") -> dist.ProcessGroup | None:
        """Return the process group of the ranks that share this rank's coordinates on all other axes.

        Collective: every rank must request the same groups in the same order. None if the group is this rank alone.

        Args:
            axes: axes that the group spans.
            ends: further axes of which the group holds the first and the last coordinate; ranks between them get None.
            purpose: name of transfers that run at the same time as others of these ranks; each has separate groups.
        """
        others = [axis for axis in AXES if axis not in axes]
        return self._of_equal_keys(lambda at: tuple(at[axis] for axis in others), axes, ends, purpose)

    def links(self, axis: str, purpose: str, around: bool = False) -> dict[int, dist.ProcessGroup]:
        """Return this rank's process groups with its neighbours on ``axis``, keyed by the lower neighbour's coordinate.

        Each ``purpose`` has separate groups. Collective over all ranks.

        Args:
            purpose: name of the data that the neighbours exchange.
            around: whether the last and the first coordinate are neighbours too; their key is the last coordinate.
        """
        key = axis, purpose, around
        if key not in self._links:
            size, at = self.sizes[axis], self._coordinates(self.rank)
            found: dict[int, dist.ProcessGroup] = {}
            for firsts in _disjoint_pairs(size, around):
                pair = [self.rank]
                first = next((first for first in firsts if at[axis] in (first, (first + 1) % size)), None)
                if first is not None:
                    other = (first + 1) % size if at[axis] == first else first
                    pair.append(self._rank_at({**at, axis: other}))
                group = groups.make(sorted(pair), of_links(self._ctas, axis))
                if first is not None:
                    found[first] = group
            self._links[key] = found
        return self._links[key]

    def subgroup(self, axis: str | tuple[str, ...], size: int) -> dist.ProcessGroup | None:
        """Return the group of ``size`` adjacent ranks along ``axis`` with this rank. Collective; see :meth:`group`.

        Args:
            axis: one axis, or several that act as one; a rank's position is its :meth:`index` over them.
            size: number of ranks in each group.

        Raises:
            ConfigError: ``size`` does not divide the axis.
        """
        axes = self._divided(axis, size)
        kept = [a for a in AXES if a not in axes]
        return self._of_equal_keys(lambda at: (self._along(axes, at) // size, *(at[a] for a in kept)), axes, ())

    def across(
        self, axis: str | tuple[str, ...], size: int, *others: str, ends: Sequence[str] = ()
    ) -> dist.ProcessGroup | None:
        """Return the group of the ranks at this position in each :meth:`subgroup`. Collective; see :meth:`group`.

        Args:
            others: further axes that the group spans.
            ends: see :meth:`group`.

        Raises:
            ConfigError: ``size`` does not divide the axis.
        """
        axes = self._divided(axis, size)
        kept = [a for a in AXES if a not in (*axes, *others)]
        return self._of_equal_keys(
            lambda at: (self._along(axes, at) % size, *(at[a] for a in kept)), (*axes, *others), ends
        )

    def node(self, ranks_per_node: int) -> dist.ProcessGroup | None:
        """Return the group of this rank's node, whose ranks are consecutive; None for a single rank. Collective.

        Args:
            ranks_per_node: number of these ranks on each node; the last node may have fewer.
        """
        starts = range(0, self.world_size, ranks_per_node)
        ends = [min(first + ranks_per_node, self.world_size) for first in starts]
        return self._build([tuple(range(first, end)) for first, end in zip(starts, ends, strict=True)], ())

    def network_choices(self) -> dict[str, str]:
        """Return readable NCCL options of the communicators in use; empty without CUDA.

        A key is ``thread blocks of`` and an axis or ``links of pp``. A value gives number of thread blocks and cluster
        size, as far as they are configured. Communicators with NCCL's defaults are left out.
        """
        if self.device.type != "cuda":
            return {}
        words = {axis: in_words(self._ctas.get(axis, NCCLS_OWN)) for axis in AXES if self.sizes[axis] > 1}
        if self.sizes["pp"] > 1:
            words["links of pp"] = in_words(of_links(self._ctas, "pp"))
        return {f"thread blocks of {name}": found for name, found in words.items() if found}

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator for ``purpose``: equal on ranks that share a sample (cp, tp), distinct over dp and pp."""
        at = self._coordinates(self.rank)
        return _generator(f"{self.seed}/{purpose}/{at['pp']}/{at['dp']}", device)

    def shared_generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator for ``purpose`` that is equal on all ranks (initial weights, data order)."""
        return _generator(f"{self.seed}/{purpose}", device)

    def _divided(self, axis: str | tuple[str, ...], size: int) -> tuple[str, ...]:
        """Return the axes as a tuple, after the check that ``size`` divides their number of ranks."""
        axes = (axis,) if isinstance(axis, str) else axis
        if size < 1 or self.size(*axes) % size:
            named = f"axis {axes[0]!r}" if len(axes) == 1 else f"the axes {' x '.join(axes)}"
            raise ConfigError(f"a group of {size} ranks does not divide the {self.size(*axes)} ranks of {named}")
        return axes

    def _along(self, axes: Sequence[str], coordinates: Mapping[str, int]) -> int:
        """Return the position on ``axes`` as one axis; the first in ``AXES`` order varies slowest."""
        index = 0
        for axis in AXES:
            if axis in axes:
                index = index * self.sizes[axis] + coordinates[axis]
        return index

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return found

    def _rank_at(self, at: Mapping[str, int]) -> int:
        rank = 0
        for axis in AXES:
            rank = rank * self.sizes[axis] + at[axis]
        return rank

    def _of_equal_keys(
        self,
        key: Callable[[Mapping[str, int]], tuple[int, ...]],
        axes: Sequence[str],
        ends: Sequence[str],
        purpose: str = "",
    ) -> dist.ProcessGroup | None:
        """Return the group of ranks with this rank's key; on ``ends`` the first and last coordinate count as equal."""
        families: dict[tuple[int, ...], list[int]] = {}
        between: list[tuple[int, ...]] = []
        for rank in range(self.world_size):
            at = self._coordinates(rank)
            if any(0 < at[axis] < self.sizes[axis] - 1 for axis in ends):
                between.append((rank,))
            else:
                families.setdefault(key({**at, **dict.fromkeys(ends, 0)}), []).append(rank)
        return self._build([*(tuple(members) for members in families.values()), *between], (*axes, *ends), purpose)

    def _build(
        self, families: list[tuple[int, ...]], axes: Sequence[str], purpose: str = ""
    ) -> dist.ProcessGroup | None:
        """Return this rank's group of a partition of the ranks; ``axes`` are the spanned axes, empty for a node."""
        ctas = of_axes(self._ctas, tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1))
        key = ctas, tuple(families), purpose
        if key not in self._groups:
            mine = next(members for members in families if self.rank in members)
            if all(len(members) == 1 for members in families):
                self._groups[key] = None
            elif len(families) == 1 and len(mine) == dist.get_world_size() and ctas == NCCLS_OWN and not purpose:
                self._groups[key] = dist.group.WORLD
            else:
                made = groups.make(mine, ctas)
                self._groups[key] = made if len(mine) > 1 else None
        return self._groups[key]


def _disjoint_pairs(size: int, around: bool) -> list[list[int]]:
    """Return the lower coordinates of neighbour pairs, in rounds in which the pairs are disjoint."""
    firsts = range(size - 1)
    turns = [list(firsts[::2]), list(firsts[1::2])]
    if around and size > 1:
        if size % 2 == 0:
            turns[1].append(size - 1)
        else:
            turns.append([size - 1])
    return [turn for turn in turns if turn]


def _generator(text: str, device: torch.device | str) -> torch.Generator:
    """Return a generator whose seed is a digest of ``text``."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
