"""Group norm with apex's channels_last kernels, ``apex.contrib.group_norm``.

The kernels take one input and add nothing to it. Autograd adds the gradients of an input that is returned (``keep``).
For sizes without a kernel apex silently calls PyTorch, so :func:`group_norm_apex` refuses them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.ops.group_norm import GroupNormResult, apex_unsupported_sizes, check


@functools.cache
def _layer(channels: int, groups: int, eps: float, silu: bool, device: torch.device) -> Any:
    """Return apex's module, which chooses a kernel by size. Its own parameters are not used."""
    from apex.contrib.group_norm import GroupNorm

    return GroupNorm(groups, channels, eps, device=device, act="silu" if silu else "")


def group_norm_apex(
    inputs: tuple[Tensor, ...],
    weight_C: Tensor,
    bias_C: Tensor,
    groups: int,
    eps: float,
    *,
    silu: bool,
    added_NC: Tensor | None = None,
    keep: bool = False,
) -> GroupNormResult:
    """Return the group norm (N, C, H, W), then SiLU if ``silu``; with ``keep`` also ``inputs``.

    See :func:`common.ops.group_norm.group_norm_reference`.

    Raises:
        UnsupportedImplementation: apex has no kernel for these sizes.
    """
    check(inputs, weight_C, groups, added_NC)
    reason = apex_unsupported_sizes(weight_C.numel(), groups, len(inputs), added_NC is not None)
    if reason is not None:
        raise UnsupportedImplementation(reason)
    x_NCHW = inputs[0].contiguous(memory_format=torch.channels_last)
    layer = _layer(weight_C.numel(), groups, eps, silu, x_NCHW.device)
    y_NCHW: Tensor = torch.func.functional_call(layer, {"weight": weight_C, "bias": bias_C}, x_NCHW)
    return (y_NCHW, inputs) if keep else y_NCHW
