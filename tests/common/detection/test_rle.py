"""Compressed run-length codes against pycocotools' bytes."""

from __future__ import annotations

import numpy as np
import pytest
from pycocotools import mask as coco

from common.detection import rle


def run_lengths(mask: np.ndarray) -> np.ndarray:
    """Of zeros and ones in turn down the columns, zeros first; by going through the pixels."""
    lengths, last = [0], 0
    for pixel in mask.T.ravel().tolist():
        if pixel != last:
            lengths.append(0)
            last = pixel
        lengths[-1] += 1
    return np.array(lengths, np.int32)


def check(masks: list[np.ndarray]) -> None:
    runs = [run_lengths(mask) for mask in masks]
    count = np.array([len(own) for own in runs], np.int32)
    found = rle.rles(np.concatenate(runs), count, np.array([mask.shape for mask in masks]))
    assert found == [coco.encode(np.asfortranarray(mask)) for mask in masks]


def random_masks() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = random.integers(1, 40, (120, 2))
    return [(random.random(shape) < share).astype(np.uint8) for shape in shapes for share in (0.0, 0.03, 0.5, 1.0)]


def test_texts_are_pycocotools() -> None:
    check(random_masks())


def test_texts_of_long_runs_are_pycocotools() -> None:
    picture = np.zeros((640, 640), np.uint8)
    picture[30:500, 100:600] = 1
    picture[::7, 300:320] = 0
    check([picture, 1 - picture, np.ones((640, 640), np.uint8), picture[:, :1]])


def test_masks_beyond_a_portion_are_encoded_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rle, "_AT_ONCE", 100)
    masks = random_masks()
    assert max(len(run_lengths(mask)) for mask in masks) > 200
    check(masks)


def test_the_longest_lengths() -> None:
    """Seven characters of five bits, and a difference below zero."""
    runs = np.array([2**31 - 1, 1, 5, 2, 2**31 - 1], np.int32)
    size = (1, int(runs.astype(np.int64).sum()))
    found = rle.rles(runs, np.array([5]), np.array([size]))
    assert found == coco.frPyObjects([{"size": list(size), "counts": runs.tolist()}], *size)


def test_no_mask() -> None:
    assert rle.rles(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 2), np.int32)) == []


def test_runs_that_are_no_picture_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask 1 don't add up to its \[2, 3\] px"):
        rle.rles(np.array([6, 5]), np.array([1, 1]), np.array([[2, 3], [2, 3]]))


def test_runs_of_no_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="3 runs are not those of 1 masks"):
        rle.rles(np.array([1, 2, 3]), np.array([2]), np.array([[1, 3]]))
