"""The focal loss's reference against torchvision's with autograd, and what it promises about scales and bad shapes."""

import pytest
import torch
from focal_loss_oracle import ALPHA, GAMMA, by_torchvision, level

from benchmarks.retinanet.ops.focal_loss import focal_loss_reference


def found(case, scale=1.0, alpha=ALPHA, gamma=GAMMA, incoming=None):
    logits, bias = case.logits.detach().requires_grad_(), case.bias.detach().requires_grad_()
    loss_scale = torch.tensor(scale)
    loss = focal_loss_reference(logits, bias, case.classes, case.weight, alpha, gamma, loss_scale)
    incoming = loss_scale.to(loss.dtype) if incoming is None else incoming
    return [loss.detach(), *torch.autograd.grad(loss, [logits, bias], incoming)]


def error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.6, 0.0), (0.25, 1.5)])
def test_loss_and_gradients_are_torchvisions(alpha, gamma):
    case = level(3, 4, 5, 3, 7, torch.float64)
    values = found(case, 8.0, alpha, gamma)
    assert values[0].dtype == torch.float64
    for value, expected in zip(values, by_torchvision(case, alpha, gamma, 8.0), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-12)  # weights are fp32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 1e-3)])
def test_arithmetic_is_in_fp32(dtype, tolerance):
    case = level(2, 5, 3, 2, 9, dtype)
    values = found(case, 1024.0)
    assert [value.dtype for value in values] == [torch.float32, dtype, dtype]
    assert values[1].is_contiguous(memory_format=torch.channels_last)
    for value, expected in zip(values, by_torchvision(case, scale=1024.0), strict=True):
        assert error(value, expected) < tolerance


def test_gradients_of_negatives_survive_fp16_because_the_scale_comes_first():
    case = level(1, 2, 2, 1, 8, torch.float16, spread=0.1)
    new_classifier = torch.full_like(case.bias, -4.6)
    case = case._replace(classes=torch.full_like(case.classes, -1), weight=torch.tensor([1e-3]), bias=new_classifier)
    assert (found(case)[1] == 0).all()
    assert (found(case, 65536.0)[1] > 0).all()


def test_another_gradient_than_the_scale_makes_the_step_not_finite():
    case = level(1, 2, 2, 1, 4)
    _, d_logits, d_bias = found(case, 4.0, incoming=torch.tensor(2.0))
    assert d_bias.isnan().all()
    logits = case.logits.detach().requires_grad_()
    loss = focal_loss_reference(logits, case.bias, case.classes, case.weight, ALPHA, GAMMA, torch.tensor(4.0))
    assert torch.autograd.grad(loss, logits)[0].isnan().all()
    assert d_logits.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 17), (1, 18), (2, 0), (2, 45)])
def test_classes_of_another_number_of_anchors_are_refused(shape):
    case = level(2, 3, 3, 2, 4)
    with pytest.raises(ValueError, match="don't fit"):
        found(case._replace(classes=torch.zeros(shape, dtype=torch.int64)))
