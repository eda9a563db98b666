"""The ranks that share the parameters: each updates its shard, and together they hold all parameters."""

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

    The ranks of the ``dp`` and ``cp`` axes hold the same weights, so both axes share shards: adjacent ranks on the
    two axes taken as one, with ``cp`` as the inner axis.

    Args:
        layout: layout of all ranks. Collective: every rank builds the plan with the same arguments.
        shard: ``none``: every rank updates everything. ``all``: the ranks of ``dp`` and ``cp`` share. ``node``: the
            ranks of ``dp`` and ``cp`` on one node share.
        ranks_per_node: number of consecutive ranks in a node, for ``node``.

    Attributes:
        ranks: number of ranks that share.
        index: position of this rank among them.
        group: process group of these ranks; None if it is this rank alone.
        other_ranks: ranks that hold the other parameters of this replica (``pp``, ``tp``); None if it is this rank
            alone.
        writes: whether this rank writes the state for all ranks that have the same parameters.
        near_writer: whether this rank shares with a rank that writes, or is one.

    Raises:
        ValueError: ``shard`` is unknown, or nodes split the ranks of ``cp`` or ``tp`` into unequal parts.
        ConfigError: the ranks of a node do not divide the ranks of ``dp`` and ``cp``.
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
        """Return the ranks over which the gradients of ``group`` are summed. Collective.

        If gradients have been summed over ``cp`` before, each of its ranks has the whole sum. They are then scattered
        over the replicas that share, and a rank keeps only its own piece of the result.

        Args:
            done: axes over which the gradients have been summed before.
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
        """Check that both ends of a tied axis have equally many weights in each tied group. Collective.

        Raises:
            ValueError: the numbers differ.
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
        """Return the ranks that have parts of one micro-batch's gradient; None if this rank has it all. Collective."""
        return self._layout.group(*micro_batch_axes(group))

    def sum_over_shards(self, values: Tensor) -> None:
        """Sum a small tensor in place over the ranks that share."""
        if self.group is not None:
            _sum_in_order(values, self.group, self.ranks)

    def sum_over_replica(self, values: Tensor) -> None:
        """Sum a small tensor in place over the ranks that together hold the parameters of one replica."""
        self.sum_over_shards(values)
        self.sum_over_other_ranks(values)

    def sum_over_other_ranks(self, values: Tensor) -> None:
        """Sum a small tensor in place over ``other_ranks``."""
        if self.other_ranks is not None:
            _sum_in_order(values, self.other_ranks, self._layout.size(*self._other_axes))


def micro_batch_axes(group: ParameterGroup) -> tuple[str, ...]:
    """Return the axes over which the gradients of one micro-batch are parts of a sum."""
    return tuple(dict.fromkeys(axis for axis in ("cp", *group.summed_over) if axis != "dp"))


def _sum_in_order(values: Tensor, group: dist.ProcessGroup, ranks: int) -> None:
    """Sum in the order of the ranks.

    An all-reduce may add in another order on another node, and then nodes that hold the same shards would diverge.
    """
    gathered = values.new_empty(ranks * values.numel())
    dist.all_gather_into_tensor(gathered, values.flatten(), group=group)
    values.copy_(gathered.view(ranks, *values.shape).sum(0))


def shard_ranks(shard: str, layout: Layout, ranks_per_node: int | None) -> int:
    """Return how many adjacent ranks of ``dp`` and ``cp`` share the parameters.

    Args:
        shard, layout, ranks_per_node: see :class:`ShardPlan`.

    Raises:
        ValueError: see :class:`ShardPlan`.
    """
    if shard == "none":
        return 1
    if shard == "all":
        return layout.size(*SUMMED_AXES)
    if shard != "node":
        raise ValueError(f"shard={shard!r}: use none, node or all")
    places = max((ranks_per_node or 0) // layout.size("tp"), 1)  # positions on dp and cp within a node
    if not (_fits(ranks_per_node or 0, layout.size("tp")) and _fits(places, layout.size("cp"))):
        inner = layout.size("cp", "tp")
        raise ValueError(f"shard='node' with ranks_per_node={ranks_per_node}: it must fit cp x tp = {inner} ranks")
    return min(places, layout.size(*SUMMED_AXES))


def _fits(ranks: int, axis: int) -> bool:
    """Return whether ``ranks`` adjacent ranks are a multiple or a whole fraction of an axis of size ``axis``."""
    return ranks > 0 and (ranks % axis == 0 or axis % ranks == 0)
