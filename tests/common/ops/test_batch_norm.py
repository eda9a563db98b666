"""Test batch norm: the reference against the formula, groups of ranks, and the layer."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.nn.batch_norm import BatchNorm2d
from common.ops import batch_norm
from common.ops.batch_norm.reference import (
    BatchNormState,
    batch_norm_add_relu_reference,
    batch_norm_reference,
    batch_norm_relu_max_pool_reference,
)
from tests.gloo_ranks import on_ranks

# Formulas


KINDS = ("plain", "relu", "add", "dual", "pool")
MOMENTUM, EPS = 0.1, 1e-5


def parameters(channels: int, seed: int, dtype: torch.dtype) -> BatchNormState:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(channels, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    mean = torch.randn(channels, generator=generator).to(dtype)
    variance = torch.rand(channels, generator=generator).to(dtype)
    return BatchNormState(weight, bias, mean, variance, MOMENTUM, EPS)


def formula(x_NCHW: Tensor, norm: BatchNormState) -> Tensor:
    """Normalize with the statistics of the batch (arXiv:1502.03167, algorithm 1) and update the running statistics.

    The running variance gets the unbiased variance.
    """
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
    """Return x and the residual; values are exact in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator).mul(2).add(3).to(dtype) for _ in range(2))
    return x, residual


def run(operations: object, kind: str, x: Tensor, residual: Tensor, group: object = None) -> dict[str, Tensor]:
    """Run forward and backward, and return results, gradients and running statistics in float64."""
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
    """Return the relative error in the 2-norm of every tensor."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)) for name in found
    }


# Ranks


SHAPE = (6, 16, 5, 4)
SPLIT = (4, 2)  # images of each rank: the parts need not be equal


def run_rank(implementation: str, rank: int, world: int, _: str) -> dict[str, dict[str, Tensor]]:
    """Run every kind on this rank's part of the batch.

    Triton's kernels are interpreted: :mod:`tests.preloaded` has imported Triton for interpretation.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    operations = SimpleNamespace(
        batch_norm=batch_norm.BATCH_NORM.function(implementation),
        batch_norm_add_relu=batch_norm.BATCH_NORM_ADD_RELU.function(implementation),
        batch_norm_relu_max_pool=batch_norm.BATCH_NORM_RELU_MAX_POOL.function(implementation),
    )
    x, residual = (value.split(SPLIT)[rank] for value in inputs(SHAPE, torch.float32))
    return {kind: run(operations, kind, x, residual, dist.group.WORLD) for kind in KINDS}


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PLAIN = SimpleNamespace(
    batch_norm=batch_norm_reference,
    batch_norm_add_relu=batch_norm_add_relu_reference,
    batch_norm_relu_max_pool=batch_norm_relu_max_pool_reference,
)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_equals_the_formula(kind):
    x, residual = inputs((3, 6, 5, 7), torch.float64)
    errors = disagreement(run(PLAIN, kind, x, residual), run(Formula, kind, x, residual))
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=NEEDS_TRITON)])
def test_group_of_two_equals_the_concatenated_batch(implementation, tmp_path):
    parts = on_ranks(functools.partial(run_rank, implementation), len(SPLIT), tmp_path)
    x, residual = inputs(SHAPE, torch.float64)
    for kind in KINDS:
        expected = run(Formula, kind, x, residual)
        found = {}
        for name in expected:
            values = [part[kind][name] for part in parts]
            if "running" in name:
                assert torch.equal(values[0], values[1]), (kind, name)
                found[name] = values[0]
            elif name.startswith("d_") and name != "d_residual":
                found[name] = values[0] + values[1]
            else:
                found[name] = torch.cat(values)
        errors = disagreement(found, expected)
        assert max(errors.values()) < 1e-5, (kind, errors)


@pytest.mark.parametrize("training", [True, False])
def test_layer_equals_torch_with_its_loaded_state(training):
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(6)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    theirs(torch.randn(4, 6, 5, 5))
    ours = BatchNorm2d(6, relu=True)
    ours.load_state_dict(theirs.state_dict())
    theirs.train(training)
    ours.train(training)
    x = torch.randn(4, 6, 5, 5)
    assert torch.allclose(ours(x), theirs(x).relu(), atol=1e-6)
    assert torch.allclose(ours.running_var, theirs.running_var)
    theirs.load_state_dict(ours.state_dict())


def test_layer_evaluates_residual_and_pool_with_running_statistics():
    torch.manual_seed(0)
    first, second, x, residual = BatchNorm2d(8), BatchNorm2d(8), torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
    for layer in (first, second):
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
        layer.eval()

    def by_hand(layer: BatchNorm2d, value: torch.Tensor) -> torch.Tensor:
        mean, deviation = layer.running_mean.view(1, -1, 1, 1), (layer.running_var + 1e-5).sqrt().view(1, -1, 1, 1)
        return (value - mean) / deviation

    expected = (by_hand(first, x) + by_hand(second, residual)).relu()
    assert torch.allclose(first.add_relu(x, residual, second)[0], expected, atol=1e-5)
    pooled = nn.functional.max_pool2d(by_hand(first, x).relu(), 3, 2, 1)
    assert torch.allclose(first.relu_max_pool(x), pooled, atol=1e-5)
