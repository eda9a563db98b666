"""Triton's mask targets against pycocotools bit for bit; run by tests/test_interpreted_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mask_oracle import Targets, expected_targets, random_targets

from benchmarks.maskrcnn.ops import mask_targets
from benchmarks.maskrcnn.ops.mask_targets import triton as mask_targets_triton
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def few_edges_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polygons take several blocks, the last of which is not full."""
    monkeypatch.setitem(mask_targets_triton.TILES, "targets", mask_targets_triton.Tile(4, 4))


def check(case: Targets, size: int) -> None:
    found = mask_targets_triton.mask_targets(case.table(), case.object, case.boxes, case.transform, size)
    assert torch.equal(found, expected_targets(case, size))


@pytest.mark.parametrize(
    ("seed", "rois", "size"), [(0, 8, 28), (1, 5, 7), pytest.param(2, 100, 28, marks=pytest.mark.slow)]
)
def test_outlines_of_several_parts_are_drawn_as_pycocotools_does(seed: int, rois: int, size: int) -> None:
    case = random_targets(seed, rois)
    assert (case.object >= 0).any()
    assert expected_targets(case, size).any()
    check(case, size)


def test_corners_where_roundings_tie() -> None:
    random = np.random.default_rng(3)
    objects = [[random.integers(-3, 60, (7, 2)).astype(np.float32) / 2] for _ in range(6)]
    transform = torch.tensor([1.0, 1.0, 0.0, 640.0]).expand(6, 4)
    check(Targets(objects, torch.arange(6), torch.tensor([[0.0, 0, 28, 28]]).expand(6, 4), transform), 28)


def test_slots_without_an_object_are_empty_whatever_else_they_hold() -> None:
    case = random_targets(4, 3)
    boxes = torch.full_like(case.boxes, torch.nan)
    found = mask_targets_triton.mask_targets(
        case.table(), torch.full_like(case.object, -1), boxes, torch.full_like(boxes, torch.nan), 28
    )
    assert not found.any()


def test_no_roi() -> None:
    case = random_targets(5, 1)
    nothing = mask_targets_triton.mask_targets(case.table(), case.object[:0], case.boxes[:0], case.transform[:0], 28)
    assert nothing.shape == (0, 28, 28)


def test_more_rows_than_bits_are_refused() -> None:
    case = random_targets(6, 1)
    with pytest.raises(ValueError, match="at most 31 rows, not 32"):
        mask_targets_triton.mask_targets(case.table(), case.object, case.boxes, case.transform, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_the_kernel_is_chosen_where_triton_runs_whatever_the_dtype(dtype: torch.dtype) -> None:
    request = OperationRequest(torch.device("cpu"), dtype, {"size": 28})
    assert mask_targets.MASK_TARGETS.select(AUTO, request).name == "triton"
