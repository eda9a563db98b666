"""Polygons and run lengths of COCO's JSON as columns: what is read, kept and refused."""

import copy
import json
import re

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from common.detection.annotations import Annotations, read_coco
from common.detection.polygons import Polygons
from common.detection.segmentations import Segmentations
from common.errors import DataError

HEIGHT, WIDTH = 6, 8
RUNS = [7, 3, 2, 1, 35]
SEGMENTATIONS = [
    [[0.1, 0.7, 5, 0.3, 5.25, 4.8]],
    {"size": [HEIGHT, WIDTH], "counts": RUNS},
    [[1, 1, 3, 1, 3, 3, 1, 3], [4, 4, 6, 4, 5, 5.5], [0, 0, 0, 2, 2, 2]],
]


def content(*segmentations):
    boxes = [
        {
            "id": index,
            "image_id": 7,
            "category_id": 1,
            "bbox": [0, 0, 4, 4],
            "area": 4,
            "iscrowd": 0,
            "segmentation": one,
        }
        for index, one in enumerate(segmentations)
    ]
    images = [{"id": 7, "height": HEIGHT, "width": WIDTH}]
    return {"images": images, "categories": [{"id": 1}], "annotations": boxes}


def read(folder, *segmentations):
    path = folder / "masks.json"
    path.write_text(json.dumps(content(*segmentations)))
    found = read_coco(path, segmentations=True).segmentations
    assert found is not None
    return found


def forms(found):
    return [found.coco(number, HEIGHT, WIDTH) for number in range(found.polygons.objects)]


def test_what_is_read_is_what_the_file_has(tmp_path):
    found = read(tmp_path, *SEGMENTATIONS)
    assert forms(found) == SEGMENTATIONS
    assert found.has_runs().tolist() == [False, True, False]
    polygons = found.polygons
    assert (polygons.objects, polygons.polygons, polygons.points) == (3, 4, 13)
    assert polygons.object_bounds.tolist() == [0, 1, 1, 4]
    assert polygons.polygon_bounds.tolist() == [0, 3, 7, 10, 13]
    assert (polygons.xy.dtype, polygons.object_bounds.dtype) == (np.float64, np.int32)
    assert polygons.single_precision().xy.tolist() == np.float32(polygons.xy).tolist()


def test_masks_are_pycocotools(tmp_path):
    found = read(tmp_path, *SEGMENTATIONS)
    for mine, given in zip(forms(found), SEGMENTATIONS, strict=True):
        decoded = [coco_mask.decode(coco_mask.frPyObjects(one, HEIGHT, WIDTH)) for one in (mine, given)]
        assert np.array_equal(*decoded)
    inside = coco_mask.decode(coco_mask.frPyObjects(found.coco(1, HEIGHT, WIDTH), HEIGHT, WIDTH))
    assert inside.T.reshape(-1).nonzero()[0].tolist() == [7, 8, 9, 12]


def test_columns_come_back_from_numpys_files(tmp_path):
    path = tmp_path / "masks.json"
    path.write_text(json.dumps(content(*SEGMENTATIONS)))
    annotations = read_coco(path, segmentations=True)
    files = annotations.write(tmp_path / "columns")
    assert {file.name for file in files} == {file.name for file in (tmp_path / "columns").iterdir()}
    assert forms(Segmentations.read(tmp_path / "columns", 3, 4, 13, 5)) == SEGMENTATIONS
    assert Annotations.read(tmp_path / "columns", 1, 1, 3).segmentations is None
    with pytest.raises(DataError, match=r"polygons_xy.npy: is float64 \(13, 2\), not float32 \(13, 2\)"):
        Polygons.read(tmp_path / "columns", 3, 4, 13, np.float32)
    with pytest.raises(DataError, match=r"run_lengths.npy: is int32 \(5,\), not int32 \(6,\)"):
        Segmentations.read(tmp_path / "columns", 3, 4, 13, 6)


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1], [2], []], ids=str)
def test_those_of_some_objects_are_taken_in_their_order(tmp_path, rows):
    taken = read(tmp_path, *SEGMENTATIONS).taken(np.array(rows, np.int64))
    assert forms(taken) == [SEGMENTATIONS[row] for row in rows]
    assert taken.polygons.object_bounds.dtype == taken.polygons.polygon_bounds.dtype == np.int32


def test_a_set_without_objects(tmp_path):
    found = read(tmp_path)
    assert (found.polygons.objects, found.polygons.polygons, found.polygons.xy.shape) == (0, 0, (0, 2))
    assert found.has_runs().shape == (0,)


POINTS = "polygons of at least 3 points, each an x and a y"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([[1, 1, 3, 1]], f"{POINTS}, or lengths of runs"),
        ([[1, 1, 3, 1, 3, 3], [1, 1, 3, 1, 3, 3, 4]], f"{POINTS}, or lengths of runs"),
        ([], f"{POINTS}, or lengths of runs"),
        ([1, 1, 3, 1, 3, 3], f"{POINTS}, or lengths of runs"),
        ("1,1", f"{POINTS}, or lengths of runs"),
        ([[1, 1, 3, 1, 3, "3"]], f"{POINTS}, numbers from -16384 to 16384"),
        ([[1, 1, 3, 1, 3, True]], f"{POINTS}, numbers from -16384 to 16384"),
        ([[1, 1, 3, 1, 3, float("nan")]], f"{POINTS}, numbers from -16384 to 16384"),
        ([[1, 1, 3, 1, 3, 16385]], f"{POINTS}, numbers from -16384 to 16384"),
        ([[1, 1, 3, 1, 3, 10**400]], f"{POINTS}, numbers from -16384 to 16384"),
        ({"size": [WIDTH, HEIGHT], "counts": RUNS}, "run lengths of 'size' [6, 8], the picture's height and width"),
        ({"counts": RUNS}, "run lengths of 'size' [6, 8], the picture's height and width"),
        (
            {"size": [HEIGHT, WIDTH], "counts": RUNS[:-1]},
            "run lengths, a list 'counts' of integers that make 6 x 8 together",
        ),
        (
            {"size": [HEIGHT, WIDTH], "counts": [50, -2]},
            "run lengths, a list 'counts' of integers that make 6 x 8 together",
        ),
        (
            {"size": [HEIGHT, WIDTH], "counts": "`1f"},
            "run lengths, a list 'counts' of integers that make 6 x 8 together",
        ),
    ],
    ids=[
        "two points", "odd", "none", "flat", "text", "text in it", "true in it", "no number", "far", "huge",
        "turned", "no size", "short", "negative", "compressed",
    ],
)  # fmt: skip
def test_bad_segmentations_are_named_with_their_place(tmp_path, value, expected):
    with pytest.raises(DataError, match=rf"annotations\[1\]: 'segmentation' is .*, but must be {re.escape(expected)}$"):
        read(tmp_path, copy.deepcopy(SEGMENTATIONS[2]), value)


def test_a_missing_segmentation_is_named_where_masks_are_asked_for(tmp_path):
    given = content(SEGMENTATIONS[0])
    del given["annotations"][0]["segmentation"]
    path = tmp_path / "masks.json"
    path.write_text(json.dumps(given))
    assert read_coco(path).segmentations is None
    with pytest.raises(DataError, match=r"annotations\[0\]: 'segmentation' is missing"):
        read_coco(path, segmentations=True)
