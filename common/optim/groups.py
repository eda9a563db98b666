"""Parameter groups: parameters that share update settings such as weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
