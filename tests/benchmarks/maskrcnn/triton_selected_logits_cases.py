"""Triton's last layer of the mask head, for one class, against PyTorch's functions in float64; run by
tests/test_interpreted_kernels.py. Fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.ops import selected_logits
from benchmarks.maskrcnn.ops.selected_logits import triton as selected_logits_triton
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.maskrcnn.mask_loss_oracle import features, logits_of_regions
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that a region's pixels take several of them, and sums several rounds."""
    monkeypatch.setitem(selected_logits_triton.TILES, "forward", selected_logits_triton.Forward(64, 1))
    monkeypatch.setitem(selected_logits_triton.TILES, "backward", selected_logits_triton.Backward(64, 2, 1))
    monkeypatch.setitem(selected_logits_triton.TILES, "sums", selected_logits_triton.Sums(4, 8, 1))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("classes", "pixels", "channels"), [([2, -1, 0, 2], 11, 20), ([-1, -1], 4, 8), ([4], 3, 16)], ids=str
)
def test_logits_and_gradients_are_those_of_the_layer_to_all_classes(
    classes: list[int], pixels: int, channels: int, dtype: torch.dtype
) -> None:
    case = features(classes, pixels, channels, 5, dtype)
    mine = [tensor.requires_grad_() for tensor in case[:3]]
    wide = [tensor.detach().double().requires_grad_() for tensor in case[:3]]
    found = selected_logits_triton.selected_logits(*mine, case.classes)
    wanted = logits_of_regions(*wide, case.classes) + 0 * sum(tensor.sum() for tensor in wide)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found, mine, case.gradient)
    exact = torch.autograd.grad(wanted, wide, case.gradient.double())
    for one, other in zip(gradients, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCES[dtype], atol=1e-5)


def test_slots_without_an_object_are_not_read() -> None:
    case = features([-1, 1], 6, 7, 5, torch.float32)
    case.x[0], case.gradient[0] = torch.nan, torch.nan
    leaves = [tensor.requires_grad_() for tensor in case[:3]]
    found = selected_logits_triton.selected_logits(*leaves, case.classes)
    assert not found[0].any()
    gradients = torch.autograd.grad(found, leaves, case.gradient)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][0].any()


def test_no_regions() -> None:
    case = features([], 6, 7, 5, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in case[:3]]
    found = selected_logits_triton.selected_logits(*leaves, case.classes)
    assert found.shape == (0, 6)
    assert not any(gradient.any() for gradient in torch.autograd.grad(found, leaves, case.gradient))


def test_auto_takes_it_and_both_directions_are_capturable() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float16, {"channels": 256})
    logits = selected_logits.SELECTED_LOGITS.select(AUTO, request)
    assert logits.name == "triton"
    case = features([2, -1], 12, 7, 5, torch.float16)
    leaves = [tensor.requires_grad_() for tensor in case[:3]]
    with Capturable():
        torch.autograd.grad(logits.function(*leaves, case.classes), leaves, case.gradient)
    wide = OperationRequest(torch.device("cpu"), torch.float16, {"channels": 4096})
    assert selected_logits.SELECTED_LOGITS.select(AUTO, wide).name == "reference"
