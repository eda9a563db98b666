"""Group norm of channels_last pictures, optionally followed by SiLU, as used in latent U-Nets.

Mean and biased variance are those of one group of channels of one sample (Wu, He, arXiv:1803.08494, section 3.1). They
are in fp32 also for 16-bit activations.

To save memory traffic, the operation includes some of its neighbours:

- It reads a pair of inputs as their concatenation, such as that of a skip connection. A group may span both inputs.
- ``added`` is one value per sample and channel, such as the bias of the previous convolution and the time embedding.
- With ``keep`` it also returns the inputs, for the residual connection or its 1x1 shortcut. The backward pass then
  adds the gradient of these outputs while it writes the gradient of the inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.libraries import APEX_GROUP_NORM
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import FLOATS, triton_kernels, widen

APEX_CHANNELS = frozenset(
    {
        128, 256, 320, 448, 512, 640, 768, 896, 960, 1024, 1280, 1344, 1536, 1792, 1920, 2048, 2240, 2560, 2688, 3072,
        3136, 3584, 4096,
    }
)  # fmt: skip
APEX_GROUPS = frozenset({16, 32})
"""Sizes for which apex has kernels, from the documentation of its ``GroupNorm``."""

GroupNormResult = Tensor | tuple[Tensor, tuple[Tensor, ...]]


def check(inputs: tuple[Tensor, ...], weight_C: Tensor, groups: int, added_NC: Tensor | None) -> None:
    """Check the arguments of a group norm.

    Raises:
        ValueError: there is neither one input nor a pair of equal size, the number of channels differs from the weight
            or is no multiple of ``groups``, or ``added_NC`` comes with a pair or has a wrong shape.
    """
    channels = sum(x_NCHW.shape[1] for x_NCHW in inputs)
    sizes = {(x_NCHW.shape[0], *x_NCHW.shape[2:]) for x_NCHW in inputs}
    if len(inputs) not in (1, 2) or len(sizes) != 1:
        raise ValueError(f"group norm takes an input or a pair of one size, not {[tuple(x.shape) for x in inputs]}")
    if channels != weight_C.numel() or channels % groups:
        raise ValueError(f"group norm of {weight_C.numel()} channels in {groups} groups got {channels} channels")
    if added_NC is not None and (len(inputs) == 2 or added_NC.shape != inputs[0].shape[:2]):
        raise ValueError(
            f"what is added to the channels of one input {tuple(inputs[0].shape)} has a value for each of a sample, "
            f"not shape {tuple(added_NC.shape)} for {len(inputs)} inputs"
        )


def group_norm_reference(
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
    """Return PyTorch's group norm, computed in fp32, or in fp64 for fp64 inputs.

    Args:
        inputs: one tensor or a pair, (N, C_i, H, W); a pair is concatenated along the channels.
        weight_C, bias_C: scale and shift after normalising.
        groups: number of groups; divides C.
        eps: added to the variance.
        silu: whether SiLU follows.
        added_NC: added to each channel of the one input before its statistics; None for nothing.
        keep: also return ``inputs`` unchanged, as a tuple that is not concatenated, for a second consumer. Fused
            implementations then add its gradient within their backward pass.

    Returns:
        (N, C, H, W), dtype of the inputs, channels_last. With ``keep`` the pair (this result, ``inputs``). The caller
        must not change any of them in place.

    Raises:
        ValueError: see :func:`check`.
    """
    check(inputs, weight_C, groups, added_NC)
    x_NCHW = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
    widened = widen(x_NCHW)
    if added_NC is not None:
        widened = widened + widen(added_NC)[:, :, None, None]
    # For channels_last tensors on a CPU, PyTorch computes the variance as a difference of squares: at a mean of 30
    # standard deviations the error of the result is 0.002, at 1000 it is 1000. So the input is made contiguous.
    y_NCHW = F.group_norm(
        widened.contiguous(), groups, weight=weight_C.to(widened.dtype), bias=bias_C.to(widened.dtype), eps=eps
    )
    y_NCHW = y_NCHW.contiguous(memory_format=torch.channels_last)
    if silu:  # on a CPU, the backward pass is ten times slower unless y and its gradient have one memory format
        y_NCHW = F.silu(y_NCHW)
    y_NCHW = y_NCHW.to(x_NCHW.dtype)
    return (y_NCHW, inputs) if keep else y_NCHW


def apex_unsupported_sizes(channels: int, groups: int, inputs: int, added: bool) -> str | None:
    """Return why apex has no kernel for these sizes, or None if it has one.

    Args:
        inputs: number of inputs that are concatenated.
        added: whether a value is added to each channel.
    """
    if inputs != 1 or added:
        return "apex's group norm takes one input, to which nothing is added"
    if channels not in APEX_CHANNELS or groups not in APEX_GROUPS:
        return f"apex's group norm does not know {channels} channels in {groups} groups"
    return None


def _apex_unsupported(request: OperationRequest) -> str | None:
    reason = apex_unsupported_sizes(
        request.sizes["channels"],
        request.sizes["groups"],
        request.sizes.get("inputs", 1),
        bool(request.sizes.get("added", 0)),
    )
    if reason is not None:
        return reason
    if request.dtype not in FLOATS:
        return f"apex's group norm takes fp16, bf16 or fp32, not {request.dtype}"
    if request.device.type != "cuda":
        return f"apex's group norm needs a GPU, not {request.device.type}"
    return APEX_GROUP_NORM.unavailable()


GROUP_NORM = Operation(
    "group_norm",
    group_norm_reference,
    {
        "triton": triton_kernels("common.ops.group_norm.triton:group_norm"),
        "apex": Implementation("common.ops.group_norm.apex:group_norm_apex", _apex_unsupported),
    },
    kernel_names=(("group norm", r"^group_norm_|^moments_kernel|group_norm_nhwc"),),
    cases="common.ops.group_norm.cases",
)
"""Signature: ``group_norm(inputs, weight_C, bias_C, groups, eps, *, silu, added_NC=None, keep=False)``. Sizes of a
request: ``channels``, ``groups``, ``inputs`` (default 1) and ``added`` (default 0)."""
