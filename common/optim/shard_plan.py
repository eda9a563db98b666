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

    The ranks of the ``dp`` and ``cp`` axes hold the same weights. Those of ``dp`` share shards; each of those of ``cp``
    has the whole of what its ``dp`` neighbours share, and updates it alike.

    Args:
        layout: of all ranks; collective, every rank builds it alike.
        shard: ``none``: every rank updates everything. ``all``: the ``dp`` ranks share. ``node``: those of one node do.
        ranks_per_node: consecutive ranks in a node, for ``node``.

    Attributes:
        ranks: how many share.
        index: this rank's place among them.
        group: they; None where it is this rank alone.
        other_ranks: those that hold the other parameters of this replica (``pp``, ``tp``); None likewise.
        writes: whether this rank writes the state for all that have the same parameters.
        near_writer: whether one of the ranks that it shares with does.

    Raises:
        ValueError: an unknown word, or a node that does not fit the inner axes.
        ConfigError: the ranks of a node do not divide the ``dp`` axis.
    """

    def __init__(self, layout: Layout, shard: str, ranks_per_node: int | None = None) -> None:
        self._layout = layout
        self.ranks = shard_ranks(shard, layout, ranks_per_node)
        self.index = layout.index("dp") % self.ranks
        self.group = layout.subgroup("dp", self.ranks)
        self._other_axes = [axis for axis in AXES if axis not in SUMMED_AXES]
        self.other_ranks = layout.group(*self._other_axes)
        self.writes = layout.index(*SUMMED_AXES) == 0
        self.near_writer = layout.index("dp") < self.ranks and layout.index("cp") == 0

    def route(self, group: ParameterGroup, done: Sequence[str] = ()) -> Route:
        """The ranks over which the gradients of ``group`` are summed. Collective.

        Args:
            group: the parameters.
            done: axes over which they have been summed before.
        """
        axes = dict.fromkeys(
            axis for axis in (*SUMMED_AXES, *group.replicated_over, *group.summed_over) if axis not in done
        )
        others, ends = [axis for axis in axes if axis != "dp"], group.tied_over
        across = self._layout.across("dp", self.ranks, *others, ends=ends)
        return Route(self.group, across, self._layout.group(*axes, ends=ends), late=bool(ends))

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
    """How many neighbouring ``dp`` ranks share the parameters.

    Args:
        shard, layout, ranks_per_node: see :class:`ShardPlan`.

    Raises:
        ValueError: see there.
    """
    if shard == "none":
        return 1
    if shard == "all":
        return layout.size("dp")
    if shard != "node":
        raise ValueError(f"shard={shard!r}: use none, node or all")
    inner = layout.size("cp", "tp")
    if ranks_per_node is None or ranks_per_node < 1 or (ranks_per_node % inner and inner % ranks_per_node):
        raise ValueError(f"shard='node' with ranks_per_node={ranks_per_node}: it must fit cp x tp = {inner} ranks")
    return min(max(ranks_per_node // inner, 1), layout.size("dp"))
