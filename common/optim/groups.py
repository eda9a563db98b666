"""Parameter groups, which share update settings such as weight decay, and the ranks that share their parameters.

With shards, each of the sharing ranks updates its part, and together they hold all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from common.distributed.layout import AXES, Layout
from common.optim.learning_rate import Schedule
from common.optim.rules import GroupSettings

SUMMED_AXES = ("dp", "cp")
"""Layout axes over which gradients are summed.

Their ranks hold the same weights and have other samples (``dp``), or other parts of the same samples (``cp``). Ranks
of the other axes hold other weights, except layers that are ``replicated_over`` or ``summed_over`` these axes.
"""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share their update settings.

    Attributes:
        parameters: name to parameter, in the order of the model.
        weight_decay: lambda; added to the gradient (LARS, SGD, Adam, Adagrad) or to the step (LAMB, AdamW).
        lr_scale: factor on the schedule's learning rate.
        schedule: learning-rate schedule of this group. None for the optimizer's schedule, which metrics report.
        trust_ratio: scale the learning rate for each tensor (LARS, LAMB).
        grad_scale: factor on the gradient that is summed over ranks and micro-batches, applied together with the
            optimizer's ``grad_divisor``.
        learning_rate_in_momentum: whether the momentum buffer holds steps (m <- mu m - lr d; w <- w + m) or
            directions (m <- mu m + d; w <- w - lr m); see :mod:`common.optim.momentum`.
        replicated_over: axes whose ranks compute these layers redundantly, on the same input. Over them the gradients
            are averaged, not summed, and a norm over all parameters counts them once. Layers that see only this
            rank's part of a sample (``cp``) are not redundant: their gradients are parts of a sum.
        summed_over: further axes whose ranks hold the same weights and each have a part of the gradient, such as
            ``tp`` if each of its ranks sees other tokens. Over them the gradients are summed, and a norm over all
            parameters counts them once.
        tied_over: axes whose first and last rank hold the same weights and each have a part of the gradient, such as
            ``pp`` if an embedding and the output head share a weight. The gradients of these two are summed, and a
            norm over all parameters counts them once. Ranks between the two have the group without parameters.
        parts: parameter name to the number of tensors that it counts as for norms: equal pieces along its first
            dimension (query, key and value in one weight: 3). Default 1.
    """

    parameters: Mapping[str, nn.Parameter]
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    schedule: Schedule | None = None
    trust_ratio: bool = False
    grad_scale: float = 1.0
    learning_rate_in_momentum: bool = True
    replicated_over: tuple[str, ...] = ()
    summed_over: tuple[str, ...] = ()
    tied_over: tuple[str, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)


def check_groups(groups: Sequence[ParameterGroup]) -> None:
    """Check that every parameter is listed once and that every axis is known and used in one way.

    Raises:
        ValueError: a check failed; the message names the parameter or axis.
    """
    names: dict[str, int] = {}
    owners: dict[int, str] = {}
    for index, group in enumerate(groups):
        for word in ("replicated_over", "summed_over", "tied_over"):
            axes: tuple[str, ...] = getattr(group, word)
            for axis in axes:
                if axis not in AXES:
                    raise ValueError(f"{word} names an unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        for axis in group.tied_over:
            if axis in (*SUMMED_AXES, *group.replicated_over, *group.summed_over):
                raise ValueError(
                    f"tied_over names {axis!r}, over all of whose ranks the gradient is summed or averaged"
                )
        for axis in group.replicated_over:
            if axis in group.summed_over:
                raise ValueError(f"a gradient is either averaged or summed over {axis!r}, not both")
        for name, parameter in group.parameters.items():
            if name in names:
                raise ValueError(f"parameter {name!r} is in groups {names[name]} and {index}")
            if id(parameter) in owners:
                raise ValueError(f"{name!r} and {owners[id(parameter)]!r} are the same parameter: list it once")
            names[name] = index
            owners[id(parameter)] = name


def settings_of(group: ParameterGroup, layout: Layout, grad_divisor: float) -> GroupSettings:
    """Return the settings of ``group`` for the update rule.

    Args:
        grad_divisor: divisor that turns the summed gradient into the mean over the global batch, if no ranks are
            redundant.
    """
    return GroupSettings(
        grad_multiplier=group.grad_scale / (grad_divisor * redundant_ranks(group, layout, AXES)),
        weight_decay=group.weight_decay,
        trust_ratio=group.trust_ratio,
        learning_rate_in_momentum=group.learning_rate_in_momentum,
        norm_share=1.0 / _holders_in_a_replica(group, layout),
    )


def redundant_ranks(group: ParameterGroup, layout: Layout, axes: Sequence[str]) -> int:
    """Return how many ranks along ``axes`` compute ``group`` redundantly; 1 if it is replicated over none of them."""
    return layout.size(*(axis for axis in axes if axis in group.replicated_over))


def _holders_in_a_replica(group: ParameterGroup, layout: Layout) -> int:
    """Return how many ranks of one replica hold the parameters of ``group``."""
    ends = math.prod(min(layout.size(axis), 2) for axis in group.tied_over)
    return ends * layout.size(*(axis for axis in _axes_of_equal_weights(group) if axis not in SUMMED_AXES))


def _axes_of_equal_weights(group: ParameterGroup) -> set[str]:
    """Return the axes whose ranks hold the same weights of ``group``, and after the reduction the same gradients."""
    return {*SUMMED_AXES, *group.replicated_over, *group.summed_over}


@dataclass(frozen=True)
class Route:
    """The ranks over which the gradients of one parameter group are summed. None means this rank alone.

    If gradients were summed over some ranks before, so that these have the same gradients, no group has two of them.

    Attributes:
        across: ranks that hold the same shard.
        everyone: both together.
        late: reduce these gradients after all others, because some ranks have them early and others at the end.
        pieces: number of pieces of a bucket that this rank receives from a scatter over ``shard``, of which it keeps
            one. There is one for each rank that shares shards with it and had the same gradients before.
    """

    shard: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    late: bool = False
    pieces: int = 1


class ShardPlan:
    """The ranks that share shards.

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
        self.other_ranks = layout.group(*(axis for axis in AXES if axis not in SUMMED_AXES))
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


def micro_batch_axes(group: ParameterGroup) -> tuple[str, ...]:
    """Return the axes over which the gradients of one micro-batch are parts of a sum."""
    return tuple(dict.fromkeys(axis for axis in ("cp", *group.summed_over) if axis != "dp"))


def shard_ranks(shard: str, layout: Layout, ranks_per_node: int | None) -> int:
    """Return how many adjacent ranks of ``dp`` and ``cp`` share the parameters.

    Raises:
        ValueError: see :class:`ShardPlan`.
    """
    if shard == "none":
        return 1
    if shard == "all":
        return layout.size(*SUMMED_AXES)
    if shard != "node":
        raise ValueError(f"shard={shard!r}: use none, node or all")
    near = max((ranks_per_node or 0) // layout.size("tp"), 1)  # ranks of dp and cp within a node
    if not (_fits(ranks_per_node or 0, layout.size("tp")) and _fits(near, layout.size("cp"))):
        inner = layout.size("cp", "tp")
        raise ValueError(f"shard='node' with ranks_per_node={ranks_per_node}: it must fit cp x tp = {inner} ranks")
    return min(near, layout.size(*SUMMED_AXES))


def _fits(ranks: int, axis: int) -> bool:
    """Return whether ``ranks`` adjacent ranks are a multiple or a whole fraction of an axis of size ``axis``."""
    return ranks > 0 and (ranks % axis == 0 or axis % ranks == 0)
