"""The loss against its definition: the mean over samples of each one's mean squared error."""

from __future__ import annotations

import pytest
import torch

from benchmarks.stable_diffusion.diffusion import velocity_loss
from tests.capturable import Capturable


def given(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    prediction, target = (torch.randn(3, 4, 2, 5, generator=random, dtype=torch.float64) for _ in range(2))
    return prediction.to(dtype).requires_grad_(), target.to(torch.promote_types(dtype, torch.float32))


def test_loss_and_gradient_are_the_definitions() -> None:
    prediction, target = given()
    loss = velocity_loss(prediction, target)
    samples = [((prediction[i] - target[i]) ** 2).sum().item() / 40 for i in range(3)]
    assert loss.item() == pytest.approx(sum(samples) / 3, rel=1e-14)
    (gradient,) = torch.autograd.grad(loss * 8.0, prediction)
    torch.testing.assert_close(gradient, 8.0 * 2 / 120 * (prediction - target), rtol=1e-13, atol=1e-13)


def test_a_loss_scale_keeps_half_precisions_gradient_from_vanishing() -> None:
    prediction, target = (value.detach() * 2**-13 for value in given(torch.float16))
    prediction.requires_grad_()
    for scale in (1.0, 65536.0):
        loss = velocity_loss(prediction, target)
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss * scale, prediction)
        exact = scale * 2 / 120 * (prediction.detach().double() - target.double())
        error = (gradient.double() - exact).norm() / exact.norm()
        assert error < 1e-3 if scale > 1 else error > 1e-3


def test_both_directions_are_capturable() -> None:
    prediction, target = given(torch.float32)
    with Capturable():
        torch.autograd.grad(velocity_loss(prediction, target), prediction)


def test_a_prediction_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"a prediction \(2, 4, 8, 8\) for a velocity \(1, 4, 8, 8\)"):
        velocity_loss(torch.zeros(2, 4, 8, 8), torch.zeros(1, 4, 8, 8))
