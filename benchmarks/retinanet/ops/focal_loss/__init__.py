"""Sigmoid focal loss of one level of the pyramid, with its gradient from the same pass.

    loss = sum over pictures n of weight[n] * sum over anchors, classes of a_t (1 - p_t)^gamma * -log p_t

p is the sigmoid of logit plus bias. For the class of the anchor, p_t = p and a_t = alpha; for all other classes, p_t =
1 - p and a_t = 1 - alpha (Lin et al., arXiv:1708.02002, section 3). Ignored anchors have neither loss nor gradient,
whatever their logits are.

In channels_last memory, the output of the classifier's convolution has one row of K logits per anchor, so that levels
are not permuted, copied or concatenated. The bias is added here; its gradient is the column sums of the logits'
gradient.

The gradient is multiplied by the loss scale before it is rounded, because that of most negatives, about 5e-8, is below
the smallest number of fp16. The loss must therefore be differentiated with exactly this scale as incoming gradient.
Otherwise the gradient of the bias is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen

BACKGROUND = -1
"""Class of anchors without a box, for which every class is a negative."""
IGNORED = -2
"""Class of anchors that the loss ignores."""


class Scaled(NamedTuple):
    """Loss, and its gradients multiplied by the loss scale.

    Attributes:
        loss: 0-d fp32 (fp64 for fp64 logits).
        d_logits: (N, C, H, W), in the dtype of the logits.
        d_bias: (C,), in the dtype of the loss, not yet rounded.
    """

    loss: Tensor
    d_logits: Tensor
    d_bias: Tensor


Compute = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, Tensor], Scaled]
"""One pass over a level, with the arguments of :func:`focal_loss_reference`."""


class FocalLoss(torch.autograd.Function):
    """Autograd function of the focal loss. Its forward pass already computes the gradients."""

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
        # With another loss scale, the gradient becomes NaN instead of wrong, and nothing waits for the device.
        expected = torch.where(gradients[0] == loss_scale, 1.0, torch.nan)
        if not ctx.needs_input_grad[2]:  # only the gradient of the logits can carry the NaN, which costs a pass over it
            d_logits_NCHW = d_logits_NCHW * expected
        return None, d_logits_NCHW, (d_bias_C * expected).to(ctx.bias_dtype), None, None, None, None, None


def anchors_of_a_cell(logits_NCHW: Tensor, class_NA: Tensor) -> int:
    """Return the number of anchors per cell of the level.

    Raises:
        ValueError: the anchors are not a multiple of the cells, or the channels not a multiple of the anchors per
            cell.
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
    """Compute loss and gradients from y, the logit, negated where the class is that of the anchor.

    With s = sigmoid(y) = 1 - p_t, the loss is a_t s^gamma softplus(y), and its derivative by y is a_t s^gamma (s +
    gamma softplus(y) (1 - s)).

    Args:
        alpha: a_t of the anchor's own class; it is 1 - alpha for other classes.
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
    """Return the focal loss.

    Args:
        logits_NCHW: output of the classifier's convolution without bias. Channels are (anchors per cell, K classes).
        class_NA: class of every anchor, row-major over cells: 0 ... K - 1, :data:`BACKGROUND` or :data:`IGNORED`. Can
            be a column slice of a wider tensor.
        weight_N: factor of each picture, fp32.
        alpha: weight of positives; negatives have 1 - alpha.
        gamma: exponent of the modulating factor.
        loss_scale: 0-d; the gradient with which backward will be called.

    Returns:
        The weighted sum, 0-d fp32 (fp64 for fp64 logits), not scaled. Its gradients are those of the scaled loss. If
        backward is called with another gradient than ``loss_scale``, the bias gradient is NaN.

    Raises:
        ValueError: the shapes don't fit.
    """
    anchors_of_a_cell(logits_NCHW, class_NA)
    loss: Tensor = FocalLoss.apply(compute_reference, logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)
    return loss


FOCAL_LOSS = Operation(
    "focal_loss",
    focal_loss_reference,
    {
        "triton": triton_kernels("benchmarks.retinanet.ops.focal_loss.triton:focal_loss"),
    },
    kernel_names=(("focal loss", r"^focal_loss_"),),
    cases="benchmarks.retinanet.ops.focal_loss.cases",
)
"""Signature: ``focal_loss(logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)``."""
