"""Triton's focal loss against torchvision's in float64; run by tests/test_interpreted_kernels.py. Tensors that the
kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
from focal_loss_oracle import ALPHA, GAMMA, Level, by_torchvision, level
from torch import Tensor

from benchmarks.retinanet.ops import focal_loss
from benchmarks.retinanet.ops.focal_loss import triton as focal_loss_triton
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [
    (3, 4, 5, 3, 16),
    (1, 1, 1, 1, 1),
    (2, 3, 5, 9, 3),
    (2, 7, 3, 2, 12),
    pytest.param((1, 2, 3, 9, 264), marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks on a device of several multiprocessors, so that programs walk over several periods."""
    monkeypatch.setattr(focal_loss_triton, "multiprocessors", lambda device: 2)
    tile = focal_loss_triton.Tile(vectors=16, warps=4, programs=2, stages=1)
    monkeypatch.setitem(focal_loss_triton.TILES, "loss", tile)


def found(case: Level, scale: float = 1.0, alpha: float = ALPHA, gamma: float = GAMMA) -> list[Tensor]:
    """Loss, and gradients of the scaled loss."""
    logits, bias = case.logits.detach().requires_grad_(), case.bias.detach().requires_grad_()
    loss_scale = torch.tensor(scale)
    loss = focal_loss_triton.focal_loss(logits, bias, case.classes, case.weight, alpha, gamma, loss_scale)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    return [loss.detach(), *torch.autograd.grad(loss * loss_scale, [logits, bias])]


def check(case: Level, scale: float = 1.0, alpha: float = ALPHA, gamma: float = GAMMA) -> None:
    values = found(case, scale, alpha, gamma)
    assert [value.dtype for value in values[1:]] == [case.logits.dtype] * 2
    assert values[1].is_contiguous(memory_format=torch.channels_last)
    for name, value, expected in zip(
        ("loss", "logits", "bias"), values, by_torchvision(case, alpha, gamma, scale), strict=True
    ):
        tolerance = TOLERANCE[torch.float32 if name == "loss" else case.logits.dtype]
        error = (value.double() - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_loss_and_gradients_are_torchvisions(size: tuple[int, ...]) -> None:
    check(level(*size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_logits_and_a_loss_scale(dtype: torch.dtype) -> None:
    check(level(2, 3, 5, 3, 8, dtype), scale=256.0)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.6, 0.0), (0.25, 1.5)])
def test_other_exponents(alpha: float, gamma: float) -> None:
    check(level(2, 3, 2, 3, 8), 1.0, alpha, gamma)


def test_single_negatives_are_as_exact_as_the_others() -> None:
    """A logit of -20 leaves a gradient of 1e-26, to all its digits."""
    case = level(1, 6, 1, 1, 4)
    logits = torch.tensor([-20.0, -9.0, -4.6, -0.5, 0.5, 12.0]).view(1, 1, 6, 1).expand(case.logits.shape)
    case = case._replace(logits=logits, bias=torch.zeros(4), classes=torch.full_like(case.classes, -1))
    for value, expected in zip(found(case), by_torchvision(case), strict=True):
        assert (value.double() / expected - 1).abs().max() < 5e-6


def test_logits_far_from_zero() -> None:
    case = level(1, 6, 3, 1, 8, spread=300.0)
    values = found(case)
    assert all(value.isfinite().all() for value in values)
    check(case)


def test_ignored_anchors_may_have_any_logits() -> None:
    case = level(2, 3, 3, 2, 4)
    ignored = (case.classes == -2).reshape(2, 3, 3, 2).repeat_interleave(4, 3).permute(0, 3, 1, 2)
    assert ignored.any()
    expected = found(case)
    case = case._replace(logits=torch.where(ignored, torch.nan, case.logits))
    for value, before in zip(found(case), expected, strict=True):
        assert torch.equal(value, before)
    assert (found(case)[1][ignored] == 0).all()


def test_nothing_but_ignored_anchors() -> None:
    case = level(2, 3, 3, 2, 4)
    for value in found(case._replace(classes=torch.full_like(case.classes, -2))):
        assert (value == 0).all()


def test_classes_in_32_bits_and_logits_in_another_memory_format() -> None:
    case = level(2, 3, 2, 2, 8)
    other = case._replace(logits=case.logits.contiguous(), classes=case.classes.int())
    for value, before in zip(found(other), found(case), strict=True):
        assert torch.equal(value, before)


def test_another_gradient_than_the_scale_makes_the_step_not_finite() -> None:
    case = level(1, 2, 2, 1, 4)
    logits, bias = case.logits.requires_grad_(), case.bias.requires_grad_()
    loss = focal_loss_triton.focal_loss(logits, bias, case.classes, case.weight, ALPHA, GAMMA, torch.tensor(4.0))
    assert torch.autograd.grad(loss, bias)[0].isnan().all()


def test_a_period_wastes_less_than_any_shorter_one() -> None:
    assert focal_loss_triton.period_of(297, 128) == 3  # 891 of 896
    assert focal_loss_triton.period_of(297, 256) == 6  # 1782 of 1792
    assert focal_loss_triton.period_of(128, 128) == 1


def test_the_kernel_is_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float16)
    assert focal_loss.FOCAL_LOSS.select(AUTO, request).name == "triton"
