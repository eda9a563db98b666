"""Test properties of the Triton noising and loss that cases cannot express.

tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

import math

import pytest
import torch
from noising_oracle import LATENT_SCALE, moments

from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.ops import noising, velocity_loss
from benchmarks.stable_diffusion.ops.noising import triton as noising_triton
from benchmarks.stable_diffusion.ops.velocity_loss import triton as velocity_loss_triton
from common.ops.operation import AUTO, OperationRequest
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

CPU = torch.device("cpu")


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


def test_a_loss_scale_keeps_half_precisions_gradient_from_vanishing() -> None:
    prediction = torch.full((1, 4, 16, 16), 2.0**-12, dtype=torch.float16).requires_grad_()
    loss = velocity_loss_triton.velocity_loss(prediction, torch.zeros(1, 4, 16, 16))
    (gradient,) = torch.autograd.grad(loss * 65536.0, prediction)
    assert (gradient == 65536 * 2 / 1024 * 2.0**-12).all()


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
