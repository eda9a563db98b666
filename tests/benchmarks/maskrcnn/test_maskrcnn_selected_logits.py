"""Test the reference of the mask head's last layer against PyTorch's functions, region by region."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.maskrcnn.ops import selected_logits


class Features(NamedTuple):
    """Features (R, P, C), weight (K, C), bias (K,), gradient of the logits (R, P), and classes (R,)."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    gradient: Tensor
    classes: Tensor


def features(classes: list[int], pixels: int, channels: int, kinds: int, dtype: torch.dtype) -> Features:
    """Made up."""
    random = torch.Generator().manual_seed(channels)
    shapes = (len(classes), pixels, channels), (kinds, channels), (kinds,)
    drawn = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    gradient = torch.randn((len(classes), pixels), generator=random)
    return Features(*drawn, gradient, torch.tensor(classes, dtype=torch.int64))


def logits_of_regions(x: Tensor, weight: Tensor, bias: Tensor, classes: Tensor) -> Tensor:
    """A linear layer to all classes, of which one is taken; (R, P)."""
    rows = [
        F.linear(x[region], weight, bias)[:, own] if own >= 0 else x.new_zeros(x.shape[1])
        for region, own in enumerate(classes.tolist())
    ]
    return torch.stack(rows)


LOGITS = selected_logits.SELECTED_LOGITS.reference


@pytest.mark.parametrize("classes", [[2, -1, 0, 2, 4], [-1, -1], [3]])
def test_logits_and_gradients_are_those_of_the_layer_to_all_classes(classes):
    x, weight, bias, gradient, own = features(classes, 6, 7, 5, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    found, wanted = LOGITS(*leaves, own), logits_of_regions(*leaves, own)
    torch.testing.assert_close(found, wanted)
    if wanted.requires_grad:
        mine, theirs = (torch.autograd.grad(logits, leaves, gradient.double()) for logits in (found, wanted))
        torch.testing.assert_close(mine, theirs)
    else:
        assert not any(own.any() for own in torch.autograd.grad(found, leaves, gradient.double()))


def test_slots_without_an_object_are_not_read():
    x, weight, bias, gradient, own = features([-1, 1], 6, 7, 5, torch.float32)
    x[0], gradient[0] = torch.nan, 0.0
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    found = LOGITS(*leaves, own)
    assert not found[0].any()
    assert found.isfinite().all()
    assert all(value.isfinite().all() for value in torch.autograd.grad(found, leaves, gradient))


def test_what_does_not_fit_is_refused():
    x, weight, bias, _, own = features([1], 6, 7, 5, torch.float32)
    with pytest.raises(ValueError, match="don't fit"):
        LOGITS(x, weight[:, 1:], bias, own)
