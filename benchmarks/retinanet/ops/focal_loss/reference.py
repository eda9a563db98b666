"""The reference of :mod:`benchmarks.retinanet.ops.focal_loss`, and what both have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.triton_support import widen

BACKGROUND = -1
"""Class of anchors without a box: every class is absent."""
IGNORED = -2
"""Class of anchors that do not count."""


class Scaled(NamedTuple):
    """The loss, and its gradients times the loss scale.

    Attributes:
        loss: 0-d fp32 (fp64 of fp64).
        d_logits: (N, C, H, W), like the logits.
        d_bias: (C,), dtype of the loss, not yet rounded.
    """

    loss: Tensor
    d_logits: Tensor
    d_bias: Tensor


Compute = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, Tensor], Scaled]
"""One pass over a level, with the arguments of :func:`focal_loss_reference`."""


class FocalLoss(torch.autograd.Function):
    """Autograd around a pass that has computed the gradients already."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Compute,
        logits_NCHW: Tensor,
        bias_C: Tensor,
        class_NA: Tensor,
        weight_N: Tensor,
        alpha: float,
        gamma: float,
        loss_scale: Tensor,
    ) -> Tensor:
        logits_NCHW = logits_NCHW.contiguous(memory_format=torch.channels_last)
        scaled = compute(logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)
        ctx.save_for_backward(scaled.d_logits, scaled.d_bias, loss_scale)
        ctx.bias_dtype = bias_C.dtype
        return scaled.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_logits_NCHW, d_bias_C, loss_scale = ctx.saved_tensors
        # a caller who scales otherwise gets a step that is not finite, not a wrong one, and nobody waits for the device
        expected = torch.where(gradients[0] == loss_scale, 1.0, torch.nan)
        if not ctx.needs_input_grad[2]:  # nothing but the logits can say so: a pass over them
            d_logits_NCHW = d_logits_NCHW * expected
        return None, d_logits_NCHW, (d_bias_C * expected).to(ctx.bias_dtype), None, None, None, None, None


def anchors_of_a_cell(logits_NCHW: Tensor, class_NA: Tensor) -> int:
    """How many anchors share a place of the level.

    Raises:
        ValueError: the anchors are no multiple of the places, or the channels none of these.
    """
    pictures, channels, height, width = logits_NCHW.shape
    anchors, rest = divmod(class_NA.shape[1], height * width)
    if len(class_NA) != pictures or rest or not anchors or channels % anchors:
        raise ValueError(f"logits {tuple(logits_NCHW.shape)} and classes of anchors {tuple(class_NA.shape)} don't fit")
    return anchors


def compute_reference(
    logits_NCHW: Tensor,
    bias_C: Tensor,
    class_NA: Tensor,
    weight_N: Tensor,
    alpha: float,
    gamma: float,
    loss_scale: Tensor,
) -> Scaled:
    """Loss and gradients as formulas of y, which is the logit, negated where the class is the anchor's.

    With s = sigmoid(y), which is 1 - p_t, a_t s^gamma times softplus(y) and s + gamma softplus(y) (1 - s).
    """
    pictures, channels, height, width = logits_NCHW.shape
    classes = channels // anchors_of_a_cell(logits_NCHW, class_NA)
    x_NHWC = widen(logits_NCHW).permute(0, 2, 3, 1) + widen(bias_C)
    x_NAK = x_NHWC.reshape(pictures, -1, classes)
    counts_NA1 = (class_NA != IGNORED).unsqueeze(2)
    weight_NA1 = torch.where(counts_NA1, weight_N.to(x_NAK.dtype)[:, None, None], 0.0)
    own_NAK = class_NA.unsqueeze(2) == torch.arange(classes, device=class_NA.device)
    sign_NAK = torch.where(own_NAK, -1.0, 1.0).to(x_NAK.dtype)
    balance_NAK = torch.where(own_NAK, alpha, 1 - alpha).to(x_NAK.dtype)

    y_NAK = torch.where(counts_NA1, x_NAK, 0.0) * sign_NAK
    softplus_NAK = y_NAK.clamp(min=0) + y_NAK.abs().neg().exp().log1p()
    s_NAK = y_NAK.sigmoid()
    common_NAK = weight_NA1 * balance_NAK * s_NAK**gamma
    loss = (common_NAK * softplus_NAK).sum()
    slope_NAK = s_NAK + gamma * softplus_NAK * (-y_NAK).sigmoid()
    gradient_NAK = sign_NAK * common_NAK * slope_NAK * loss_scale.to(x_NAK.dtype)

    d_NHWC = gradient_NAK.reshape(pictures, height, width, channels)
    d_logits_NCHW = d_NHWC.to(logits_NCHW.dtype).permute(0, 3, 1, 2)
    return Scaled(loss, d_logits_NCHW, d_NHWC.sum((0, 1, 2)))


def focal_loss_reference(
    logits_NCHW: Tensor,
    bias_C: Tensor,
    class_NA: Tensor,
    weight_N: Tensor,
    alpha: float,
    gamma: float,
    loss_scale: Tensor,
) -> Tensor:
    """Reference implementation.

    Args:
        logits_NCHW: the classifier's convolution, without its bias; channels are K classes of each of a cell's anchors.
        bias_C: the bias.
        class_NA: class of every anchor, row-major over cells, 0 ... K - 1, :data:`BACKGROUND` or :data:`IGNORED`; may
            be some columns of a wider tensor.
        weight_N: factor of each picture, fp32.
        alpha: weight of the classes that are there; 1 - alpha is that of the others.
        gamma: exponent of the modulating factor.
        loss_scale: 0-d; the gradient that backward will be called with.

    Returns:
        The weighted sum, 0-d fp32 (fp64 for fp64 logits), not scaled. Its gradients are those of the scaled loss; where
        backward is called with anything but ``loss_scale`` the bias's is NaN.

    Raises:
        ValueError: the shapes don't fit.
    """
    anchors_of_a_cell(logits_NCHW, class_NA)
    loss: Tensor = FocalLoss.apply(compute_reference, logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)
    return loss
