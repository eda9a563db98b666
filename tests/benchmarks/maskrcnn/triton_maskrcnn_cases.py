"""Test selection, capture, refusals and special values of Mask R-CNN's Triton kernels.

Cases of the operations cannot express them. tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.maskrcnn.ops import mask_targets, paste, resize, roi_align, selected_logits
from benchmarks.maskrcnn.ops.roi_align import Regions
from benchmarks.maskrcnn.polygon_table import PolygonCapacity, PolygonTable
from common.ops.cases import Draw
from common.ops.catalogue import cases_of
from common.ops.operation import AUTO, Operation
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

CPU = torch.device("cpu")
STRIDES = (2, 4, 8, 16)
SMALL: dict[str, tuple[Operation, dict[str, Any]]] = {
    "mask_targets": (mask_targets.MASK_TARGETS, {"rois": 3, "capacity": PolygonCapacity(5, 7, 70)}),
    "paste": (paste.PASTE, {"detections": 2, "height": (5, 9), "width": (5, 9)}),
    "resize": (resize.RESIZE, {"slot": 6, "shape": (9, 9), "pictures": (((5, 6), (7, 9), True),)}),
    "roi_align": (
        roi_align.ROI_ALIGN,
        {"pictures": 1, "channels": 4, "height": 24, "width": 36, "strides": STRIDES, "heads": ((2, 2, 2), (1, 1, 2))},
    ),
    "selected_logits": (
        selected_logits.SELECTED_LOGITS,
        {"pictures": 1, "slots": 2, "objects": 1, "pixels": 12, "channels": 7},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_auto_takes_the_kernels_and_a_graph_can_hold_them(name):
    operation, sizes = SMALL[name]
    case = cases_of(operation)[0]
    chosen = operation.select(AUTO, case.request(CPU, torch.float16, **sizes))
    assert chosen.name == "triton"
    passes = case.passes(chosen.function, Draw(CPU, torch.float16), **sizes)
    with Capturable():
        for each in passes:
            each.run()


def test_auto_takes_the_reference_of_the_logits_where_channels_are_too_many():
    operation = selected_logits.SELECTED_LOGITS
    request = cases_of(operation)[0].request(CPU, torch.float16, channels=4096)
    assert operation.select(AUTO, request).name == "reference"


def test_slots_without_a_region_read_nothing():
    levels = [torch.full((1, 3, 24 // stride, 36 // stride), torch.nan, requires_grad=True) for stride in STRIDES]
    boxes, there = torch.tensor([4.0, 4.0, 30.0, 30.0]).expand(1, 3, 4), torch.zeros((1, 3), dtype=torch.bool)
    (found,) = roi_align.ROI_ALIGN.function("triton")(levels, [Regions(boxes, there, 4)], STRIDES, 2)
    assert not found.any()
    gradients = torch.autograd.grad(found, levels, torch.full_like(found, torch.inf))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("sets", "regions", "message"), [(3, 1, "3 sets of regions"), (1, 32769, "32769 regions")])
def test_more_than_two_sets_or_than_16_bit_number_are_refused(sets, regions, message):
    levels = [torch.zeros((1, 4, 24 // stride, 36 // stride)) for stride in STRIDES]
    own = Regions(torch.zeros((1, regions, 4)), torch.ones((1, regions), dtype=torch.bool), 2)
    with pytest.raises(ValueError, match=message):
        roi_align.ROI_ALIGN.function("triton")(levels, [own] * sets, STRIDES, 2)


def test_targets_of_more_rows_than_bits_are_refused():
    table, boxes = PolygonTable(PolygonCapacity(1, 1, 9), CPU), torch.zeros((1, 4))
    with pytest.raises(ValueError, match="at most 31 rows, not 32"):
        mask_targets.MASK_TARGETS.function("triton")(table, torch.zeros(1, dtype=torch.int64), boxes, boxes, 32)


def test_pixels_that_do_not_lie_behind_one_another_are_refused():
    size, pixels = torch.ones((1, 2)), torch.zeros((1, 6, 6, 3), dtype=torch.uint8).transpose(1, 2)
    with pytest.raises(ValueError, match="pixels_BSS3 must be contiguous"):
        resize.RESIZE.function("triton")(
            pixels, size.int(), size, torch.tensor([True]), (0.0, 0.0, 0.0), (2, 2), torch.float32
        )
