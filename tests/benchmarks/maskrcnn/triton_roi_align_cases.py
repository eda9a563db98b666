"""Triton's RoIAlign against torchvision's in float64; run by tests/test_interpreted_kernels.py. Fresh memory holds NaN
here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.ops import roi_align
from benchmarks.maskrcnn.ops.roi_align import Regions
from benchmarks.maskrcnn.ops.roi_align import triton as roi_align_triton
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.maskrcnn.roi_align_oracle import FINER, expected, pyramid, regions
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that regions cross them, lists take several rounds and channels several blocks."""
    tiles = {
        "forward": roi_align_triton.Forward(16, 4),
        "lists": roi_align_triton.Lists(8, 1),
        "backward": roi_align_triton.Backward(8, 16, 32, 4),
    }
    for key, tile in tiles.items():
        monkeypatch.setitem(roi_align_triton.TILES, key, tile)


def assert_as_torchvision(
    levels: list[Tensor], sets: list[Regions], samples: int, without: tuple[int, ...] = ()
) -> None:
    """Features of every set, and gradients of levels by all sets but those ``without`` one."""
    dtype, random = levels[0].dtype, torch.Generator().manual_seed(9)
    wide = [level.detach().double().requires_grad_() for level in levels]
    levels = [level.requires_grad_() for level in levels]
    found = roi_align_triton.roi_align(levels, sets, FINER, samples)
    wanted = [expected(wide, boxes, there, FINER, bins, samples) for boxes, there, bins in sets]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert one.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    asked = [index for index in range(len(sets)) if index not in without]
    gradients = [torch.randn(found[index].shape, generator=random).to(dtype) for index in asked]
    mine = torch.autograd.grad([found[index] for index in asked], levels, gradients)
    exact = torch.autograd.grad(
        [wanted[index] for index in asked], wide, [gradient.double() for gradient in gradients], allow_unused=True
    )
    for one, other, level in zip(mine, exact, wide, strict=True):
        assert one.dtype == dtype
        assert one.is_contiguous(memory_format=torch.channels_last)
        other = torch.zeros_like(level) if other is None else other
        error = (one.double() - other).abs().max() / other.abs().max().clamp(min=1)
        assert error < TOLERANCES[dtype], f"relative error {error:.2e}"


def made_up(
    seed: int, pictures: int, channels: int, dtype: torch.dtype, anywhere: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Levels of 12 x 18 places and fewer, boxes, and whether they are there."""
    random = torch.Generator().manual_seed(seed)
    levels = pyramid(random, pictures, channels, 24, 36, dtype, FINER)
    return levels, *regions(random, pictures, 24, 36, FINER, anywhere)


def test_features_and_gradients_of_both_heads_are_torchvisions() -> None:
    levels, boxes, there = made_up(1, 2, 12, torch.float32, 0)
    assert_as_torchvision(levels, [Regions(boxes, there, 2), Regions(boxes[:, 2:4], there[:, 2:4], 3)], 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_features_and_gradients_in_16_bit(dtype: torch.dtype) -> None:
    levels, boxes, there = made_up(2, 1, 20, dtype, 0)
    assert_as_torchvision(levels, [Regions(boxes[:, ::4], there[:, ::4], 2)], 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("bins", "samples"), [(7, 2), (5, 1), (1, 3), (18, 2)])
def test_other_resolutions(bins: int, samples: int, dtype: torch.dtype) -> None:
    levels, boxes, there = made_up(bins, 2, 20, dtype, 10)
    assert_as_torchvision(levels, [Regions(boxes, there, bins)], samples)


@pytest.mark.parametrize("without", [0, 1])
def test_a_head_without_gradient_counts_for_nothing(without: int) -> None:
    levels, boxes, there = made_up(3, 1, 8, torch.float32, 0)
    sets = [Regions(boxes[:, :2], there[:, :2], 2), Regions(boxes[:, 2:4], there[:, 2:4], 3)]
    assert_as_torchvision(levels, sets, 1, without=(without,))


def test_slots_without_a_region_read_nothing() -> None:
    levels = [torch.full_like(level, torch.nan) for level in made_up(4, 1, 3, torch.float32, 0)[0]]
    levels = [level.requires_grad_() for level in levels]
    boxes, there = torch.tensor([4.0, 4.0, 30.0, 30.0]).expand(1, 3, 4), torch.zeros((1, 3), dtype=torch.bool)
    found = roi_align_triton.roi_align(levels, [Regions(boxes, there, 4)], FINER, 2)[0]
    assert not found.any()
    gradients = torch.autograd.grad(found, levels, torch.full_like(found, torch.inf))
    assert not any(gradient.any() for gradient in gradients)


def test_no_regions_at_all() -> None:
    levels = [level.requires_grad_() for level in made_up(4, 1, 4, torch.float32, 0)[0]]
    none = Regions(torch.zeros((1, 0, 4)), torch.zeros((1, 0), dtype=torch.bool), 7)
    found = roi_align_triton.roi_align(levels, [none], FINER, 2)[0]
    assert found.shape == (0, 4, 7, 7)
    assert not any(gradient.any() for gradient in torch.autograd.grad(found.sum(), levels))


def test_levels_and_gradients_may_lie_channels_first() -> None:
    levels, boxes, there = made_up(5, 1, 16, torch.float32, 0)
    own, random = Regions(boxes[:, :3], there[:, :3], 2), torch.Generator().manual_seed(5)
    dense = [level.contiguous().requires_grad_() for level in levels]
    levels = [level.requires_grad_() for level in levels]
    results = [roi_align_triton.roi_align(given, [own], FINER, 1)[0] for given in (dense, levels)]
    assert torch.equal(*results)
    gradient = torch.randn(results[0].shape, generator=random).contiguous()
    mine, theirs = (
        torch.autograd.grad(result, given, gradient) for result, given in zip(results, (dense, levels), strict=True)
    )
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_more_than_two_sets_or_than_16_bit_number_are_refused() -> None:
    levels = made_up(4, 1, 4, torch.float32, 0)[0]
    own = Regions(torch.zeros((1, 1, 4)), torch.ones((1, 1), dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="3 sets of regions"):
        roi_align_triton.roi_align(levels, [own, own, own], FINER, 2)
    many = Regions(torch.zeros((1, 32769, 4)), torch.ones((1, 32769), dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="32769 regions"):
        roi_align_triton.roi_align(levels, [many], FINER, 2)


def test_auto_takes_it_and_both_directions_are_capturable() -> None:
    chosen = roi_align.ROI_ALIGN.select(AUTO, OperationRequest(torch.device("cpu"), torch.float32))
    assert chosen.name == "triton"
    levels, boxes, there = made_up(6, 1, 4, torch.float32, 0)
    levels = [level.requires_grad_() for level in levels]
    with Capturable():
        found = chosen.function(levels, boxes[:, :3], there[:, :3], FINER, 2, 1)
        torch.autograd.grad(found, levels, torch.ones_like(found))
