"""Test the focal loss for extreme logits, and the choice of the kernel's tiles.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from focal_loss_oracle import ALPHA, GAMMA, Level, by_torchvision, level
from torch import Tensor

from benchmarks.retinanet.ops.focal_loss import focal_loss_reference
from benchmarks.retinanet.ops.focal_loss.triton import focal_loss, period_of

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")


BOTH = pytest.mark.parametrize("function", [focal_loss, focal_loss_reference], ids=["triton", "reference"])


def found(case: Level, function: Callable[..., Tensor] = focal_loss) -> list[Tensor]:
    """Return the loss and its gradients."""
    logits, bias = case.logits.detach().requires_grad_(), case.bias.detach().requires_grad_()
    loss = function(logits, bias, case.classes, case.weight, ALPHA, GAMMA, torch.tensor(1.0))
    return [loss.detach(), *torch.autograd.grad(loss, [logits, bias])]


def test_single_negatives_are_as_exact_as_the_others():
    """A logit of -20 leaves a gradient of 1e-26, to all its digits."""
    case = level(1, 6, 1, 1, 4)
    logits = torch.tensor([-20.0, -9.0, -4.6, -0.5, 0.5, 12.0]).view(1, 1, 6, 1).expand(case.logits.shape)
    case = case._replace(logits=logits, bias=torch.zeros(4), classes=torch.full_like(case.classes, -1))
    for value, expected in zip(found(case), by_torchvision(case), strict=True):
        assert (value.double() / expected - 1).abs().max() < 5e-6


@BOTH
def test_logits_far_from_zero(function):
    case = level(1, 6, 3, 1, 8, spread=300.0)
    for value, expected in zip(found(case, function), by_torchvision(case), strict=True):
        assert (value.double() - expected).norm() < 2e-6 * expected.norm()


@BOTH
def test_ignored_anchors_may_have_any_logits(function):
    case = level(2, 3, 3, 2, 4)
    ignored = (case.classes == -2).reshape(2, 3, 3, 2).repeat_interleave(4, 3).permute(0, 3, 1, 2)
    assert ignored.any()
    expected = found(case, function)
    values = found(case._replace(logits=torch.where(ignored, torch.nan, case.logits)), function)
    assert all(torch.equal(value, before) for value, before in zip(values, expected, strict=True))
    assert (values[1][ignored] == 0).all()
    assert values[1].is_contiguous(memory_format=torch.channels_last)


def test_nothing_but_ignored_anchors():
    case = level(2, 3, 3, 2, 4)
    for value in found(case._replace(classes=torch.full_like(case.classes, -2))):
        assert (value == 0).all()


def test_a_period_wastes_less_than_any_shorter_one():
    assert period_of(297, 128) == 3  # 891 of 896
    assert period_of(297, 256) == 6  # 1782 of 1792
    assert period_of(128, 128) == 1
