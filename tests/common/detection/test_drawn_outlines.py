"""Polygons of drawn shapes against the pixels that are drawn, as pycocotools rasterises them."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from common.detection.coco_stand_in import run_lengths
from common.detection.drawn_outlines import outlines
from common.detection.drawn_pictures import SHAPES, shape_of

PARTS = {"saltire": 2, "ring": 3, "frame": 4}


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=SHAPES)
@pytest.mark.parametrize("points", [0, 21])
def test_outlines_follow_the_drawn_pixels(shape, points):
    for height, width, least in ((24, 30, 0.85), (61, 44, 0.9), (200, 300, 0.96)):
        parts = outlines(shape, height, width, points)
        assert len(parts) == PARTS.get(SHAPES[shape], 1)
        assert min(len(part) for part in parts) >= max(points, 3)
        corners = np.concatenate(parts)
        np.testing.assert_allclose([corners.min(0), corners.max(0)], [[0, 0], [width, height]], atol=1e-9)
        rles = coco_mask.frPyObjects([part.reshape(-1).tolist() for part in parts], height, width)
        found, drawn = coco_mask.decode(coco_mask.merge(rles)).astype(bool), shape_of(shape, height, width)
        assert (found & drawn).sum() / (found | drawn).sum() > least, (height, width)


def test_small_objects_are_rectangles():
    for shape in range(len(SHAPES)):
        [part] = outlines(shape, 2, 5)
        assert part.tolist() == [[0, 0], [5, 0], [5, 2], [0, 2]]


def test_a_ring_without_its_hole_would_not_do():
    rles = coco_mask.frPyObjects([part.reshape(-1).tolist() for part in outlines(SHAPES.index("ring"), 60, 60)], 60, 60)
    inside = coco_mask.decode(coco_mask.merge(rles))
    assert not inside[25:35, 25:35].any()
    assert inside[2, 30] == inside[57, 30] == inside[30, 2] == inside[30, 57] == 1


def test_run_lengths_are_pycocotools():
    random = np.random.default_rng(4)
    for inside in (random.random((7, 5)) < 0.4, np.ones((3, 2), bool), np.zeros((3, 2), bool)):
        runs = {"size": list(inside.shape), "counts": run_lengths(inside)}
        decoded = coco_mask.decode(coco_mask.frPyObjects(runs, *inside.shape))
        assert np.array_equal(decoded.astype(bool), inside)
        assert sum(runs["counts"]) == inside.size
