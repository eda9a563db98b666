"""Triton's virtual paste against whole pictures; run by tests/test_interpreted_kernels.py. Fresh memory holds the
largest integers here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mask_oracle import codes, pasted, random_masks
from pycocotools import mask as coco

from benchmarks.maskrcnn.ops import paste
from benchmarks.maskrcnn.ops.paste import triton as paste_triton
from benchmarks.maskrcnn.ops.paste.masks import Masks, find_runs
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PASTE = paste.PASTE.function("triton")


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box is more pixels than a program looks at at a time."""
    monkeypatch.setitem(paste_triton.TILES, "paste", paste_triton.Tile(128, 4))


def check(masks: Masks, threshold: float = 0.5) -> None:
    found = find_runs(PASTE, threshold, *masks)
    for place, code in enumerate(codes(found, masks)):
        assert code == coco.encode(np.asfortranarray(pasted(masks, place, threshold)))


@pytest.mark.parametrize(
    ("seed", "detections", "most"), [(0, 10, 24), pytest.param(1, 150, 60, marks=pytest.mark.slow)]
)
def test_codes_are_those_of_whole_pictures(seed: int, detections: int, most: int) -> None:
    check(random_masks(seed, detections, most))


def test_columns_that_reach_both_ends_of_the_picture_follow_each_other() -> None:
    """In the second picture up to its last pixel; the third box leaves the first and last columns out."""
    height, width = 12, 9
    boxes = [(-40.0, -40.0, 30.0, 50.0), (3.0, -40.0, 40.0, 50.0), (2.0, -30.0, 6.0, 40.0), (-40.0, 4.0, 30.0, 60.0)]
    probability = random_masks(3, 1).probability_DSS.flip(1).expand(4, 28, 28).clone()
    probability[1:, 6:-6] = 0.998
    masks = Masks(probability, torch.tensor(boxes), torch.tensor([[height, width]] * 4), torch.ones(4).bool())
    assert pasted(masks, 1, 0.5)[:, -1].all()
    check(masks)


def test_slots_without_a_detection_have_no_run_whatever_they_hold() -> None:
    masks, there = random_masks(4, 3, 12), torch.tensor([False, True, False])
    bad = torch.where(there[:, None], masks.boxes_D4, torch.nan)
    found = find_runs(PASTE, 0.5, *masks._replace(boxes_D4=bad, there_D=there))
    assert torch.equal(found.counts_D > 0, there)
    assert codes(found, masks)[1] == coco.encode(np.asfortranarray(pasted(masks, 1, 0.5)))


def test_half_probabilities_and_another_size() -> None:
    masks = random_masks(5, 2, 16)
    check(masks._replace(probability_DSS=masks.probability_DSS[:, 3:13, 5:15].half().clamp(max=0.99)))


def test_no_detection() -> None:
    found = find_runs(PASTE, 0.5, *(column[:0] for column in random_masks(6, 1)))
    assert [len(column) for column in found] == [0, 0]


def test_the_kernel_is_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float16)
    assert paste.PASTE.select(AUTO, request).name == "triton"
