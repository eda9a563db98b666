"""Parameter groups: parameters that are updated alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from common.distributed.layout import AXES, Layout
from common.optim.learning_rate import Schedule
from common.optim.rules import GroupSettings

SUMMED_AXES = ("dp", "cp")
"""Axes over which gradients are summed: their ranks hold the same weights and have other samples, or other parts of
the same samples. The ranks of the other axes hold other weights, but for layers that are ``replicated_over`` them, or
whose gradients are ``summed_over`` them.
"""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated alike.

    Attributes:
        parameters: name to parameter, in the order of the model.
        weight_decay: lambda; part of the gradient (LARS, SGD, Adam) or of the step (LAMB, AdamW).
        lr_scale: factor on the schedule's learning rate.
        schedule: of this group's learning rate; None for the optimizer's, which is the one that metrics report.
        trust_ratio: scale the learning rate by tensor (LARS, LAMB).
        grad_scale: what the gradient, summed over ranks and micro-batches, is multiplied with before anything else,
            beside the optimizer's own ``grad_divisor``.
        learning_rate_in_momentum: whether the momentum buffer holds steps (m <- mu m - lr d; w <- w + m) or directions
            (m <- mu m + d; w <- w - lr m); see :mod:`common.optim.momentum`.
        replicated_over: axes of the layout whose ranks compute these layers redundantly, on the same input; over them
            the gradients are averaged, not summed, and a norm over all parameters counts them once. Layers that see
            only this rank's part of a sample (``cp``) are not redundant: their gradients are parts of a sum.
        summed_over: further axes whose ranks hold the same weights and have parts of the gradient each, such as ``tp``
            where each of its ranks sees tokens of its own. Over them the gradients are summed, not averaged, and a norm
            over all parameters counts them once.
        tied_over: axes whose first and last rank hold the same weights and have parts of the gradient each, such as
            ``pp`` where an embedding is the head's weight too. The gradients are summed over these two, and a norm over
            all parameters counts them once. Ranks between the two have the group without parameters.
        parts: name of a parameter to the number of tensors that it counts as for norms by tensor, equal pieces along
            its first dimension (query, key and value in one weight: 3). Others count as one.
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
    """Make sure that every parameter is listed once, and every axis and name is known.

    Raises:
        ValueError: naming what is wrong.
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
    """What the update rule needs of ``group``.

    Args:
        group: the parameters.
        layout: of all ranks.
        grad_divisor: what the gradient in the shard divided by is the mean, redundant ranks aside.
    """
    return GroupSettings(
        grad_multiplier=group.grad_scale / (grad_divisor * redundant_ranks(group, layout, AXES)),
        weight_decay=group.weight_decay,
        trust_ratio=group.trust_ratio,
        learning_rate_in_momentum=group.learning_rate_in_momentum,
        norm_share=1.0 / _holders_in_a_replica(group, layout),
    )


def redundant_ranks(group: ParameterGroup, layout: Layout, axes: Sequence[str]) -> int:
    """How many ranks along ``axes`` compute ``group`` redundantly: 1 where it is not replicated over any of them."""
    return layout.size(*(axis for axis in axes if axis in group.replicated_over))


def _holders_in_a_replica(group: ParameterGroup, layout: Layout) -> int:
    """How many ranks that hold one replica's parameters together hold those of ``group``."""
    ends = math.prod(min(layout.size(axis), 2) for axis in group.tied_over)
    return ends * layout.size(*(axis for axis in _axes_of_equal_weights(group) if axis not in SUMMED_AXES))


def _axes_of_equal_weights(group: ParameterGroup) -> set[str]:
    """Axes whose ranks hold the same weights of ``group``, and after the reduction the same gradients."""
    return {*SUMMED_AXES, *group.replicated_over, *group.summed_over}
