"""Run-lengths of the virtual paste's reference against whole pictures, encoded by pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mask_oracle import codes, pasted, random_masks
from pycocotools import mask as coco

from benchmarks.maskrcnn.ops.paste import PASTE, MaskRuns, Masks, find_runs


def check(masks: Masks, threshold: float = 0.5) -> list[np.ndarray]:
    """Every mask's code; returns the pictures."""
    found = find_runs(PASTE.reference, threshold, *masks)
    assert found.counts_D.dtype == found.runs_T.dtype == torch.int32
    pictures = [pasted(masks, index, threshold) for index in range(len(masks.there_D))]
    for code, picture in zip(codes(found, masks), pictures, strict=True):
        assert code == coco.encode(np.asfortranarray(picture))
    return pictures


def one(box: tuple[float, ...], height: int, width: int, probability: torch.Tensor | None = None) -> Masks:
    """A single detection, by default with a mask of ones."""
    mask = torch.full((28, 28), 0.998) if probability is None else probability
    return Masks(mask[None], torch.tensor([box]), torch.tensor([[height, width]]), torch.tensor([True]))


def runs(masks: Masks) -> list[int]:
    return find_runs(PASTE.reference, 0.5, *masks).runs_T.tolist()


@pytest.mark.parametrize(("seed", "threshold"), [(0, 0.5), (1, 0.3)])
def test_codes_are_those_of_whole_pictures(seed, threshold):
    pictures = check(random_masks(seed, 300), threshold)
    assert sum(not picture.any() for picture in pictures) > 20
    assert sum(bool(picture[0, 0]) for picture in pictures) > 10
    assert sum(bool(picture[-1, -1]) for picture in pictures) > 10
    assert sum(bool((picture[0, 1:] & picture[-1, :-1]).any()) for picture in pictures) > 20  # a run over two columns


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_probabilities_are_widened_first(dtype):
    masks = random_masks(2, 40)
    check(masks._replace(probability_DSS=(masks.probability_DSS.to(dtype) * 0.97).clamp(max=0.99)))


def test_a_mask_of_another_size():
    masks = random_masks(3, 40)
    check(masks._replace(probability_DSS=masks.probability_DSS[:, 3:13, 5:15]))


def test_boxes_of_a_pixel_or_less():
    masks = random_masks(4, 40)
    corner = masks.boxes_D4[:, :2]
    check(masks._replace(boxes_D4=torch.cat([corner, corner + 0.4], 1)))


def test_a_box_by_hand():
    """From 0 to 14 it grows to -0.5 to 14.5, cut to 0 to 14: 15 px of two probabilities each.

    The outermost pixels are half border, half object: exactly 0.5, which is not above the threshold.
    """
    whole = torch.ones(28, 28)
    assert runs(one((0.0, 0.0, 14.0, 14.0), 20, 16, whole)) == [21, *[13, 7] * 12, 13, 46]


def test_a_picture_that_is_all_object_begins_with_no_zeros():
    assert runs(one((-50.0, -50.0, 60.0, 60.0), 9, 7)) == [0, 63]


def test_a_picture_without_any_object_is_one_run():
    assert runs(one((1.0, 1.0, 6.0, 6.0), 9, 7, torch.full((28, 28), 0.4))) == [63]


@pytest.mark.parametrize(
    "box", [(20.0, 2.0, 30.0, 6.0), (-30.0, 2.0, -9.0, 6.0), (2.0, 30.0, 5.0, 40.0), (5.0, 5.0, 2.0, 2.0)], ids=str
)
def test_a_box_beside_the_picture_or_inside_out_leaves_zeros(box):
    assert runs(one(box, 9, 7)) == [63]


def test_slots_without_a_detection_have_no_run_whatever_they_hold():
    masks = random_masks(5, 9)
    there = torch.tensor([False, True, False, False, True, True, False, True, False])
    bad = torch.where(there[:, None], masks.boxes_D4, torch.nan)
    found = find_runs(PASTE.reference, 0.5, *masks._replace(boxes_D4=bad, there_D=there))
    assert torch.equal(found.counts_D > 0, there)
    alone = find_runs(PASTE.reference, 0.5, *(column[there] for column in masks))
    assert torch.equal(found.runs_T, alone.runs_T)
    assert torch.equal(found.counts_D[there], alone.counts_D)


@pytest.mark.parametrize("detections", [0, 3])
def test_no_detection_at_all(detections):
    masks = Masks(*(column[:detections] for column in random_masks(6, 3)))
    found = find_runs(PASTE.reference, 0.5, *masks._replace(there_D=torch.zeros(detections, dtype=torch.bool)))
    assert isinstance(found, MaskRuns)
    assert found.counts_D.tolist() == [0] * detections
    assert found.runs_T.shape == (0,)
