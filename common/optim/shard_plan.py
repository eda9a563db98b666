"""Which ranks share the parameters: each of them updates its shard, and all of them together hold the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import AXES, Layout
from common.optim.groups import SUMMED_AXES, ParameterGroup
from common.optim.reduce import Route


class ShardPlan:
    """The ranks that share shards, and sums over them.

    The ranks of the ``dp`` and ``cp`` axes hold the same weights, and share shards whatever of the two tells them
    apart: neighbours on both axes taken as one, of which ``cp`` is the inner.

    Args:
        layout: of all ranks; collective, every rank builds it alike.
        shard: ``none``: every rank updates everything. ``all``: the ranks of ``dp`` and ``cp`` share. ``node``: of
            these, those of one node do.
        ranks_per_node: consecutive ranks in a node, for ``node``.

    Attributes:
        ranks: how many share.
        index: this rank's place among them.
        group: they; None where it is this rank alone.
        other_ranks: those that hold the other parameters of this replica (``pp``, ``tp``); None likewise.
        writes: whether this rank writes the state for all that have the same parameters.
        near_writer: whether one of the ranks that it shares with does.

    Raises:
        ValueError: an unknown word, or nodes that cut the ranks of ``cp`` or ``tp`` into unequal parts.
        ConfigError: the ranks of a node do not divide those of ``dp`` and ``cp``.
    """

    def __init__(self, layout: Layout, shard: str, ranks_per_node: int | None = None) -> None:
        self._layout = layout
        self.ranks = shard_ranks(shard, layout, ranks_per_node)
        self.index = layout.index(*SUMMED_AXES) % self.ranks
        self.group = layout.subgroup(SUMMED_AXES, self.ranks)
        self._other_axes = [axis for axis in AXES if axis not in SUMMED_AXES]
        self.other_ranks = layout.group(*self._other_axes)
        self.writes = layout.index(*SUMMED_AXES) == 0
        self.near_writer = layout.index(*SUMMED_AXES) < self.ranks

    def route(self, group: ParameterGroup, done: Sequence[str] = ()) -> Route:
        """The ranks over which the gradients of ``group`` are summed. Collective.

        Where they have been summed over ``cp`` before, each of its ranks has the whole sum: they are scattered over the
        replicas that share, and of what a rank receives it keeps the piece that is its own.

        Args:
            group: the parameters.
            done: axes over which they have been summed before.
        """
        axes = dict.fromkeys(
            axis for axis in (*SUMMED_AXES, *group.replicated_over, *group.summed_over) if axis not in done
        )
        others, ends = [axis for axis in axes if axis not in SUMMED_AXES], group.tied_over
        shared: tuple[str, ...] = SUMMED_AXES
        ranks = self.ranks
        if "cp" in done:
            shared, ranks = ("dp",), max(ranks // self._layout.size("cp"), 1)
        across = self._layout.across(shared, ranks, *others, ends=ends)
        everyone = self._layout.group(*axes, ends=ends)
        return Route(self._layout.subgroup(shared, ranks), across, everyone, bool(ends), self.ranks // ranks)

    def check_tied(self, groups: Sequence[ParameterGroup], routes: Sequence[Route], device: torch.device) -> None:
        """Make sure that both ends of an axis have as many weights in the groups that tie them. Collective.

        Raises:
            ValueError: they have not.
        """
        for group, route in zip(groups, routes, strict=True):
            if route.late and route.everyone is not None:
                own = sum(parameter.numel() for parameter in group.parameters.values())
                counts = torch.zeros(route.everyone.size(), dtype=torch.int64, device=device)
                dist.all_gather_into_tensor(counts, torch.tensor([own], device=device), group=route.everyone)
                if set(counts.tolist()) != {own}:
                    raise ValueError(
                        f"tied_over {group.tied_over}: this rank has {own} weights in the group of "
                        f"{[*group.parameters]}, the ranks that share it have {counts.tolist()}"
                    )

    def parts_of_a_micro_batch(self, group: ParameterGroup) -> dist.ProcessGroup | None:
        """The ranks that have parts of the gradient of one micro-batch; None where this rank has all. Collective."""
        return self._layout.group(*micro_batch_axes(group))

    def sum_over_shards(self, values: Tensor) -> None:
        """Sum a small tensor in place over the ranks that share."""
        if self.group is not None:
            _sum_in_order(values, self.group, self.ranks)

    def sum_over_replica(self, values: Tensor) -> None:
        """Sum a small tensor in place over the ranks that hold the parameters of one replica together."""
        self.sum_over_shards(values)
        self.sum_over_other_ranks(values)

    def sum_over_other_ranks(self, values: Tensor) -> None:
        """Sum a small tensor in place over ``other_ranks``."""
        if self.other_ranks is not None:
            _sum_in_order(values, self.other_ranks, self._layout.size(*self._other_axes))


def micro_batch_axes(group: ParameterGroup) -> tuple[str, ...]:
    """Axes over which the gradients of one micro-batch are parts of a sum."""
    return tuple(dict.fromkeys(axis for axis in ("cp", *group.summed_over) if axis != "dp"))


def _sum_in_order(values: Tensor, group: dist.ProcessGroup, ranks: int) -> None:
    """Sum rank by rank.

    An all-reduce may add in another order on another node, and then nodes that hold the same shards would drift apart.
    """
    gathered = values.new_empty(ranks * values.numel())
    dist.all_gather_into_tensor(gathered, values.flatten(), group=group)
    values.copy_(gathered.view(ranks, *values.shape).sum(0))


def shard_ranks(shard: str, layout: Layout, ranks_per_node: int | None) -> int:
    """How many neighbouring ranks of ``dp`` and ``cp`` share the parameters.

    Args:
        shard, layout, ranks_per_node: see :class:`ShardPlan`.

    Raises:
        ValueError: see there.
    """
    if shard == "none":
        return 1
    if shard == "all":
        return layout.size(*SUMMED_AXES)
    if shard != "node":
        raise ValueError(f"shard={shard!r}: use none, node or all")
    places = max((ranks_per_node or 0) // layout.size("tp"), 1)  # on dp and cp, which a node has
    if not (_fits(ranks_per_node or 0, layout.size("tp")) and _fits(places, layout.size("cp"))):
        inner = layout.size("cp", "tp")
        raise ValueError(f"shard='node' with ranks_per_node={ranks_per_node}: it must fit cp x tp = {inner} ranks")
    return min(places, layout.size(*SUMMED_AXES))


def _fits(ranks: int, axis: int) -> bool:
    """Whether so many neighbouring ranks are those of an axis once or several times, or a whole share of them."""
    return ranks > 0 and (ranks % axis == 0 or axis % ranks == 0)
