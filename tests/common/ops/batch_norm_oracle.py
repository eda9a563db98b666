"""The formulas of batch norm in float64, written out, and one case that every implementation computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.batch_norm.reference import BatchNormState

KINDS = ("plain", "relu", "add", "dual", "pool")
MOMENTUM, EPS = 0.1, 1e-5


def parameters(channels: int, seed: int, dtype: torch.dtype) -> BatchNormState:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(channels, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    mean = torch.randn(channels, generator=generator).to(dtype)
    variance = torch.rand(channels, generator=generator).to(dtype)
    return BatchNormState(weight, bias, mean, variance, MOMENTUM, EPS)


def formula(x_NCHW: Tensor, norm: BatchNormState) -> Tensor:
    """Normalise with the batch's own statistics (arXiv:1502.03167, algorithm 1); the running ones get its unbiased
    variance."""
    axes, shape, count = (0, 2, 3), (1, -1, 1, 1), x_NCHW.numel() // x_NCHW.shape[1]
    mean = x_NCHW.sum(axes) / count
    variance = (x_NCHW - mean.view(shape)).square().sum(axes) / count
    with torch.no_grad():
        norm.running_mean.copy_((1 - norm.momentum) * norm.running_mean + norm.momentum * mean)
        unbiased = variance * count / (count - 1)
        norm.running_var.copy_((1 - norm.momentum) * norm.running_var + norm.momentum * unbiased)
    x_hat = (x_NCHW - mean.view(shape)) / (variance + norm.eps).sqrt().view(shape)
    return x_hat * norm.weight.view(shape) + norm.bias.view(shape)


class Formula:
    """The three operations by formula, with the signatures of the implementations."""

    @staticmethod
    def batch_norm(x: Tensor, norm: BatchNormState, *, relu: bool = False, group: object = None) -> Tensor:
        y = formula(x, norm)
        return y.clamp(min=0) if relu else y

    @staticmethod
    def batch_norm_add_relu(
        x: Tensor,
        norm: BatchNormState,
        residual: Tensor,
        residual_norm: BatchNormState | None = None,
        *,
        group: object = None,
    ) -> tuple[Tensor, Tensor]:
        y = formula(x, norm) + (residual if residual_norm is None else formula(residual, residual_norm))
        return y.clamp(min=0), y.clamp(min=0)

    @staticmethod
    def batch_norm_relu_max_pool(x: Tensor, norm: BatchNormState, *, group: object = None) -> Tensor:
        y = F.pad(formula(x, norm).clamp(min=0), (1, 1, 1, 1), value=float("-inf"))
        windows = y.unfold(2, 3, 2).unfold(3, 3, 2)
        return windows.amax((-1, -2))


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x and the residual; values are exact in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator).mul(2).add(3).to(dtype) for _ in range(2))
    return x, residual


def run(operations: object, kind: str, x: Tensor, residual: Tensor, group: object = None) -> dict[str, Tensor]:
    """Forward and backward of one kind; results, gradients and running statistics in float64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    norm, other = parameters(x.shape[1], 1, wide), parameters(x.shape[1], 2, wide)
    outputs: tuple[Tensor, ...]
    if kind == "pool":
        outputs = (operations.batch_norm_relu_max_pool(x, norm, group=group),)
    elif kind in ("add", "dual"):
        second = other if kind == "dual" else None
        outputs = operations.batch_norm_add_relu(x, norm, residual, second, group=group)
    else:
        outputs = (operations.batch_norm(x, norm, relu=kind == "relu", group=group),)
    # incoming gradients exact in every dtype, and split over ranks as the inputs are
    incoming = residual.detach()[:, :, ::2, ::2] if kind == "pool" else residual.detach()
    torch.autograd.backward(outputs, [incoming, incoming * -0.5][: len(outputs)])
    found = {"y": outputs[0], "running_mean": norm.running_mean, "running_var": norm.running_var}
    found |= {"dx": x.grad, "d_weight": norm.weight.grad, "d_bias": norm.bias.grad}
    if kind in ("add", "dual"):
        found |= {"d_residual": residual.grad, "second_y": outputs[1]}
    if kind == "dual":
        found |= {"d_other_weight": other.weight.grad, "d_other_bias": other.bias.grad}
        found |= {"other_running_mean": other.running_mean, "other_running_var": other.running_var}
    return {name: value.detach().double() for name, value in found.items()}


def disagreement(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative error in the 2-norm of every tensor."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)) for name in found
    }
