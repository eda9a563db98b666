"""The loss of the mask head, and the reference of its last layer, against PyTorch's functions region by region."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.loss import mask_loss
from benchmarks.maskrcnn.ops import selected_logits
from tests.benchmarks.maskrcnn.mask_loss_oracle import (
    features,
    logits_of_regions,
    loss_of_regions,
    masks,
)
from tests.capturable import Capturable

LOGITS = selected_logits.SELECTED_LOGITS.reference


@pytest.mark.parametrize("classes", [[2, -1, 0, 4], [-1, -1, 3], [1]])
def test_loss_and_gradient_are_those_of_the_regions_with_an_object(classes: list[int]) -> None:
    case = masks(classes, 3, 4, torch.float64)
    logits = case.logits.requires_grad_()
    found, wanted = mask_loss(*case), loss_of_regions(*case)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, logits), torch.autograd.grad(wanted, logits))


@pytest.mark.parametrize("classes", [[-1, -1], []])
def test_without_an_object_loss_and_gradient_are_zero(classes: list[int]) -> None:
    case = masks(classes, 3, 4, torch.float32)
    logits = case.logits.requires_grad_()
    loss = mask_loss(logits, case.target, case.classes)
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("classes", [[2, -1, 0, 2, 4], [-1, -1], [3]])
def test_logits_and_gradients_are_those_of_the_layer_to_all_classes(classes: list[int]) -> None:
    x, weight, bias, gradient, own = features(classes, 6, 7, 5, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    found, wanted = LOGITS(*leaves, own), logits_of_regions(*leaves, own)
    torch.testing.assert_close(found, wanted)
    if wanted.requires_grad:
        mine, theirs = (torch.autograd.grad(logits, leaves, gradient.double()) for logits in (found, wanted))
        torch.testing.assert_close(mine, theirs)
    else:
        assert not any(own.any() for own in torch.autograd.grad(found, leaves, gradient.double()))


def test_slots_without_an_object_are_not_read() -> None:
    x, weight, bias, gradient, own = features([-1, 1], 6, 7, 5, torch.float32)
    x[0], gradient[0] = torch.nan, 0.0
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    found = LOGITS(*leaves, own)
    assert not found[0].any()
    assert found.isfinite().all()
    assert all(value.isfinite().all() for value in torch.autograd.grad(found, leaves, gradient))


def test_both_can_be_captured() -> None:
    x, weight, bias, _, own = features([2, -1, 0], 12, 7, 5, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    target = masks([2, -1, 0], 3, 4, torch.float32).target
    with Capturable():
        torch.autograd.grad(mask_loss(LOGITS(*leaves, own).unflatten(1, (3, 4)), target, own), leaves)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, bias, _, own = features([1], 6, 7, 5, torch.float32)
    with pytest.raises(ValueError, match="don't fit"):
        LOGITS(x, weight[:, 1:], bias, own)
