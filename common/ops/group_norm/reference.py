"""Reference implementation of :mod:`common.ops.group_norm`, and the argument checks of all implementations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen

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
        keep: also return the inputs, for a second consumer. Fused implementations then add its gradient within their
            backward pass.

    Returns:
        (N, C, H, W), dtype of the inputs, channels_last. With ``keep`` a pair: this result, and the inputs without
        ``added_NC``. The caller must not change any of them in place.

    Raises:
        ValueError: see :func:`check`.
    """
    check(inputs, weight_C, groups, added_NC)
    x_NCHW = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
    wide = widen(x_NCHW)
    if added_NC is not None:
        wide = wide + widen(added_NC)[:, :, None, None]
    # For channels_last tensors on a CPU, PyTorch computes the variance as a difference of squares: at a mean of 30
    # standard deviations the error of the result is 0.002, at 1000 it is 1000. So the input is made contiguous.
    y_NCHW = F.group_norm(
        wide.contiguous(), groups, weight=weight_C.to(wide.dtype), bias=bias_C.to(wide.dtype), eps=eps
    )
    y_NCHW = y_NCHW.contiguous(memory_format=torch.channels_last)
    if silu:  # on a CPU, the backward pass is ten times slower unless y and its gradient have one memory format
        y_NCHW = F.silu(y_NCHW)
    y_NCHW = y_NCHW.to(x_NCHW.dtype)
    return (y_NCHW, inputs) if keep else y_NCHW
