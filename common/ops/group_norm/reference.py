"""The reference of :mod:`common.ops.group_norm`, and the checks of all implementations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen

GroupNormResult = Tensor | tuple[Tensor, tuple[Tensor, ...]]


def check(inputs: tuple[Tensor, ...], weight_C: Tensor, groups: int, added_NC: Tensor | None) -> None:
    """Refuse what no implementation can normalise.

    Raises:
        ValueError: there is neither one input nor a pair of one size, the channels are not those of the weight or do
            not divide into the groups, or something is added to a pair, or in another shape.
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
    """PyTorch's group norm, in fp32, or in fp64 if the inputs are.

    Args:
        inputs: one tensor or a pair, (N, C_i, H, W), taken as their concatenation over the channels.
        weight_C, bias_C: scale and shift after normalising.
        groups: divide the C channels evenly.
        eps: added to the variance.
        silu: whether SiLU follows.
        added_NC: added to each channel of the one input, before its statistics; None for nothing.
        keep: hand the inputs on, for their other reader: a fused version then adds its gradient in backward's own pass.

    Returns:
        (N, C, H, W), dtype of the inputs, channels_last; with ``keep`` also the inputs, as they are: without what was
        added. None of them may be changed in place.

    Raises:
        ValueError: see :func:`check`.
    """
    check(inputs, weight_C, groups, added_NC)
    x_NCHW = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
    wide = widen(x_NCHW)
    if added_NC is not None:
        wide = wide + widen(added_NC)[:, :, None, None]
    # of channels_last tensors on a CPU PyTorch takes the variance as a difference of squares: at a mean of 30
    # deviations the result is off by 0.002, at 1000 by 1000
    y_NCHW = F.group_norm(
        wide.contiguous(), groups, weight=weight_C.to(wide.dtype), bias=bias_C.to(wide.dtype), eps=eps
    )
    y_NCHW = y_NCHW.contiguous(memory_format=torch.channels_last)
    if silu:  # in the memory format of its gradient: its backward is ten times slower on a CPU if they differ
        y_NCHW = F.silu(y_NCHW)
    y_NCHW = y_NCHW.to(x_NCHW.dtype)
    return (y_NCHW, inputs) if keep else y_NCHW
