"""Group norm with apex's channels_last kernels, ``apex.contrib.group_norm``.

The kernels take one input and add nothing to it. Autograd adds the gradients of an input that is returned (``keep``).
For sizes without a kernel, apex silently calls PyTorch, so :func:`unsupported` and :func:`group_norm_apex` refuse
them. The lists of sizes are from apex's documentation of its ``GroupNorm``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.ops.group_norm.reference import GroupNormResult, check
from common.ops.libraries import APEX_GROUP_NORM
from common.ops.operation import OperationRequest

CHANNELS = frozenset(
    {
        128, 256, 320, 448, 512, 640, 768, 896, 960, 1024, 1280, 1344, 1536, 1792, 1920, 2048, 2240, 2560, 2688, 3072,
        3136, 3584, 4096,
    }
)  # fmt: skip
GROUPS = frozenset({16, 32})
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(request: OperationRequest) -> str | None:
    """Return why apex cannot serve a request; None if it can."""
    reason = _unsupported_sizes(
        request.sizes["channels"],
        request.sizes["groups"],
        request.sizes.get("inputs", 1),
        bool(request.sizes.get("added", 0)),
    )
    if reason is not None:
        return reason
    if request.dtype not in DTYPES:
        return f"apex's group norm takes fp16, bf16 or fp32, not {request.dtype}"
    if request.device.type != "cuda":
        return f"apex's group norm needs a GPU, not {request.device.type}"
    return APEX_GROUP_NORM.unavailable()


def _unsupported_sizes(channels: int, groups: int, inputs: int, added: bool) -> str | None:
    if inputs != 1 or added:
        return "apex's group norm takes one input, to which nothing is added"
    if channels not in CHANNELS or groups not in GROUPS:
        return f"apex's group norm does not know {channels} channels in {groups} groups"
    return None


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
    """See :func:`common.ops.group_norm.reference.group_norm_reference`.

    Raises:
        UnsupportedImplementation: apex has no kernel for these sizes.
    """
    check(inputs, weight_C, groups, added_NC)
    reason = _unsupported_sizes(weight_C.numel(), groups, len(inputs), added_NC is not None)
    if reason is not None:
        raise UnsupportedImplementation(reason)
    x_NCHW = inputs[0].contiguous(memory_format=torch.channels_last)
    layer = _layer(weight_C.numel(), groups, eps, silu, x_NCHW.device)
    y_NCHW: Tensor = torch.func.functional_call(layer, {"weight": weight_C, "bias": bias_C}, x_NCHW)
    return (y_NCHW, inputs) if keep else y_NCHW
