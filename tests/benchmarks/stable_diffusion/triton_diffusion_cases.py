"""Triton's noising and loss against their definitions in float64; run by tests/test_interpreted_kernels.py. Tensors
that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noising_oracle import LATENT_SCALE, expected, moments

from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.ops import noising, velocity_loss
from benchmarks.stable_diffusion.ops.noising import triton as noising_triton
from benchmarks.stable_diffusion.ops.velocity_loss import triton as velocity_loss_triton
from common.ops.operation import AUTO, OperationRequest
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(noising_triton.TILES, "noising", noising_triton.Tile(16, 4))
    for key in velocity_loss_triton.TILES:
        monkeypatch.setitem(velocity_loss_triton.TILES, key, velocity_loss_triton.Tile(32, 4))


@DTYPES
@pytest.mark.parametrize("sizes", [(2, 4, 4, 4), (3, 3, 3, 5)], ids=["even", "odd"])
def test_latents_targets_and_times_are_the_definitions(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    stored = torch.float32 if dtype == torch.float16 else dtype
    given, ids = moments(*sizes, stored), [2**31 + 7, 0, 5][: sizes[0]]
    oracle = expected(given, -77, ids)
    table = noising.tables(abar(), LATENT_SCALE, dtype, CPU)
    found = noising_triton.noised(given, torch.tensor(-77), torch.tensor(ids), table)
    assert found.t_N.tolist() == oracle.t.tolist()
    assert (found.x_t_NCHW.dtype, found.target_NCHW.dtype, found.t_N.dtype) == (dtype, torch.float32, torch.int64)
    for value, formula in ((found.x_t_NCHW, oracle.x_t), (found.target_NCHW, oracle.target)):
        assert value.is_contiguous(memory_format=torch.channels_last)
        tolerance = TOLERANCE[value.dtype]
        np.testing.assert_allclose(value.double().numpy(), formula, rtol=tolerance, atol=tolerance)


def test_a_moment_that_is_not_finite_stays_so() -> None:
    given = moments(1, 4, 2, 2)
    given[0, 5, 1, 1] = math.nan
    table = noising.tables(abar(), LATENT_SCALE, torch.float32, CPU)
    found = noising_triton.noised(given, torch.tensor(0), torch.tensor([0]), table)
    assert found.x_t_NCHW.isnan().sum() == 1
    assert found.target_NCHW.isnan().sum() == 1


def test_moments_that_a_kernel_would_misread_are_refused() -> None:
    table = noising.tables(abar(), LATENT_SCALE, torch.float32, CPU)
    given = moments(2, 4, 2, 3).contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="moments must be contiguous"):
        noising_triton.noised(given, torch.tensor(0), torch.tensor([0, 1]), table)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 4, 4, 4), (1, 3, 5, 7)], ids=str)
def test_loss_and_gradient_are_the_definitions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    prediction, target = (torch.randn(shape, generator=random) for _ in range(2))
    prediction = prediction.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    target = target.contiguous(memory_format=torch.channels_last)
    loss = velocity_loss_triton.velocity_loss(prediction, target)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    (gradient,) = torch.autograd.grad(loss * 512.0, prediction)
    assert gradient.dtype == dtype
    difference = prediction.detach().double() - target.double()
    assert loss.item() == pytest.approx(difference.square().mean().item(), rel=1e-6)
    exact = 512 * 2 / difference.numel() * difference
    assert (gradient.double() - exact).norm() < TOLERANCE[dtype] * exact.norm()


def test_a_loss_scale_keeps_half_precisions_gradient_from_vanishing() -> None:
    prediction = torch.full((1, 4, 16, 16), 2.0**-12, dtype=torch.float16).requires_grad_()
    loss = velocity_loss_triton.velocity_loss(prediction, torch.zeros(1, 4, 16, 16))
    (gradient,) = torch.autograd.grad(loss * 65536.0, prediction)
    assert (gradient == 65536 * 2 / 1024 * 2.0**-12).all()


def test_memory_formats_may_differ() -> None:
    prediction, target = torch.randn(2, 4, 3, 3).requires_grad_(), torch.randn(2, 4, 3, 3)
    loss = velocity_loss_triton.velocity_loss(prediction, target.contiguous(memory_format=torch.channels_last))
    (gradient,) = torch.autograd.grad(loss, prediction)
    torch.testing.assert_close(gradient, 2 / 72 * (prediction - target).detach())


def test_both_directions_are_capturable() -> None:
    given, seed, ids = moments(2, 4, 2, 2), torch.tensor(3), torch.tensor([1, 2])
    table = noising.tables(abar(), LATENT_SCALE, torch.float32, CPU)
    with Capturable():
        x_t, target, _ = noising_triton.noised(given, seed, ids, table)
        prediction = x_t.requires_grad_()
        torch.autograd.grad(velocity_loss_triton.velocity_loss(prediction, target), prediction)


def test_the_kernels_are_chosen_where_triton_runs() -> None:
    request = OperationRequest(CPU, torch.float16)
    for operation in (noising.NOISING, velocity_loss.VELOCITY_LOSS):
        assert operation.select(AUTO, request).name == "triton"
