"""The reference of :mod:`common.ops.batch_norm`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.ops.norm.autograd import SumOverRanks


class BatchNormState(NamedTuple):
    """Parameters and running statistics of one batch norm.

    Attributes:
        weight, bias: (C,), scale and shift of the normalised input.
        running_mean, running_var: (C,), updated in place as in PyTorch: ``r <- (1 - momentum) r + momentum s`` with the
            unbiased variance.
        momentum: weight of the new statistics (1 minus the decay of other frameworks).
        eps: number that is added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    momentum: float = 0.1
    eps: float = 1e-5


def _normalise(x_NCHW: Tensor, norm: BatchNormState, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return F.batch_norm(
            x_NCHW,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            training=True,
            momentum=norm.momentum,
            eps=norm.eps,
        )
    widened = x_NCHW.to(norm.weight.dtype)
    shape = (1, -1, 1, 1)
    count = widened.new_tensor([widened.numel() // widened.shape[1]])
    sum_in_place = functools.partial(dist.all_reduce, group=group)
    total_C1 = SumOverRanks.apply(torch.cat([widened.sum((0, 2, 3)), count]), sum_in_place)
    elements = total_C1[-1]
    mean_C = total_C1[:-1] / elements
    centred = widened - mean_C.view(shape)
    variance_C = SumOverRanks.apply(centred.square().sum((0, 2, 3)), sum_in_place) / elements
    with torch.no_grad():
        norm.running_mean.lerp_(mean_C, norm.momentum)
        norm.running_var.lerp_(variance_C * (elements / (elements - 1)), norm.momentum)
    scaled = centred * torch.rsqrt(variance_C + norm.eps).view(shape)
    return (scaled * norm.weight.view(shape) + norm.bias.view(shape)).to(x_NCHW.dtype)


def batch_norm_reference(
    x_NCHW: Tensor,
    norm: BatchNormState,
    *,
    relu: bool = False,
    group: dist.ProcessGroup | None = None,
    moments: Tensor | None = None,
) -> Tensor:
    """Normalise with the statistics of the batch, then apply ReLU if ``relu``.

    Args:
        norm: parameters; its running statistics are updated.
        group: ranks that share statistics; None for this rank alone.
        moments: sums of x and of its square over N, H, W, fp32 (2, 1, C), if the convolution has computed them (see
            :mod:`common.ops.convolution`). The reference ignores them.

    Returns:
        Tensor of the shape and dtype of ``x_NCHW``.
    """
    y_NCHW = _normalise(x_NCHW, norm, group)
    return F.relu(y_NCHW) if relu else y_NCHW


def batch_norm_add_relu_reference(
    x_NCHW: Tensor,
    norm: BatchNormState,
    residual_NCHW: Tensor,
    residual_norm: BatchNormState | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    moments: Tensor | None = None,
    residual_moments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``relu(BN(x) + residual)``, the end of a residual block.

    Args:
        residual_norm: batch norm of the residual, or None to add the residual unchanged.

    Returns:
        The same values twice, shape and dtype of ``x_NCHW``: one for each consumer. Do not change them in place.
    """
    if residual_norm is not None:
        residual_NCHW = _normalise(residual_NCHW, residual_norm, group)
    y_NCHW = F.relu(_normalise(x_NCHW, norm, group) + residual_NCHW)
    return y_NCHW, y_NCHW


def batch_norm_relu_max_pool_reference(
    x_NCHW: Tensor, norm: BatchNormState, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return ``max_pool(relu(BN(x)), kernel 3, stride 2, padding 1)``.

    Returns:
        (N, C, (H + 1) // 2, (W + 1) // 2), dtype of ``x_NCHW``.
    """
    return F.max_pool2d(batch_norm_reference(x_NCHW, norm, relu=True, group=group), 3, stride=2, padding=1)


def batch_norm_evaluate_reference(
    x_NCHW: Tensor,
    norm: BatchNormState,
    *,
    relu: bool = False,
    residual_NCHW: Tensor | None = None,
    residual_norm: BatchNormState | None = None,
) -> Tensor:
    """Normalise with the running statistics, add the residual, then apply ReLU if ``relu``.

    Args:
        norm: parameters and statistics, which are not updated.
        residual_NCHW: tensor to add before ReLU, or None.
        residual_norm: batch norm of the residual, or None to add the residual unchanged.

    Returns:
        Tensor of the shape and dtype of ``x_NCHW``.
    """

    def normalise(value_NCHW: Tensor, by: BatchNormState) -> Tensor:
        return F.batch_norm(value_NCHW, by.running_mean, by.running_var, by.weight, by.bias, training=False, eps=by.eps)

    y_NCHW = normalise(x_NCHW, norm)
    if residual_NCHW is not None:
        y_NCHW = y_NCHW + (residual_NCHW if residual_norm is None else normalise(residual_NCHW, residual_norm))
    return F.relu(y_NCHW) if relu else y_NCHW
