"""COCO's JSON as columns: what is read, kept and refused."""

import copy
import json
import re

import numpy as np
import pytest

from common.detection.annotations import Annotations, read_coco
from common.errors import DataError

CONTENT = {
    "images": [{"id": 90, "height": 480, "width": 640, "file_name": "b.jpg"}, {"id": 7, "height": 30, "width": 20}],
    "categories": [{"id": 3, "name": "car"}, {"id": 0, "name": "person"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 0, "bbox": [1.25, 2, 3.5, 4], "area": 11.5, "iscrowd": 0},
        {"id": 2, "image_id": 90, "category_id": 3, "bbox": [0, 0, 640, 480], "area": 300, "iscrowd": 1},
        {"id": 3, "image_id": 90, "category_id": 0, "bbox": [10, 10, 0, 5], "area": 0.0, "iscrowd": 0},
    ],
}


def written(folder, content):
    path = folder / "boxes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def assert_columns(annotations):
    expected = {
        "picture_id": ("int64", [90, 7]),
        "picture_height": ("int64", [480, 30]),
        "picture_width": ("int64", [640, 20]),
        "class_id": ("int64", [3, 0]),
        "box_picture": ("int64", [7, 90, 90]),
        "box_class": ("int64", [0, 3, 0]),
        "box_xywh": ("float64", [[1.25, 2, 3.5, 4], [0, 0, 640, 480], [10, 10, 0, 5]]),
        "box_area": ("float64", [11.5, 300, 0]),
        "box_crowd": ("bool", [False, True, False]),
    }
    columns = {name: column for name, column in vars(annotations).items() if column is not None}
    assert {name: (str(column.dtype), column.tolist()) for name, column in columns.items()} == expected


def test_columns_are_as_the_file_has_them(tmp_path):
    assert_columns(read_coco(written(tmp_path, CONTENT)))


def test_columns_come_back_from_numpys_files(tmp_path):
    read_coco(written(tmp_path, CONTENT)).write(tmp_path / "columns")
    assert_columns(Annotations.read(tmp_path / "columns", 2, 2, 3))
    assert np.load(tmp_path / "columns" / "box_area.npy").tolist() == [11.5, 300, 0]


def named(*names):
    content = copy.deepcopy(CONTENT)
    for image, name in zip(content["images"], names, strict=True):
        image["file_name"] = name
    return content


def test_names_come_where_they_are_asked_for(tmp_path):
    path = written(tmp_path, named("b.jpg", "größer.jpg"))
    assert read_coco(path).picture_name is None
    annotations = read_coco(path, names=True)
    annotations.write(tmp_path / "columns")
    for found in (annotations, Annotations.read(tmp_path / "columns", 2, 2, 3, names=True)):
        assert [name.decode() for name in found.picture_name] == ["b.jpg", "größer.jpg"]
    assert_columns(Annotations.read(tmp_path / "columns", 2, 2, 3))


@pytest.mark.parametrize("name", ["", 3, None, "a\0", "\ud800"])
def test_what_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(DataError, match=r"images\[1\]: 'file_name' is .*, but must be a name"):
        read_coco(written(tmp_path, named("b.jpg", name)), names=True)


def test_columns_without_names_are_refused_where_names_are_asked_for(tmp_path):
    read_coco(written(tmp_path, CONTENT)).write(tmp_path)
    with pytest.raises(DataError, match=r"picture_name\.npy: cannot be read"):
        Annotations.read(tmp_path, 2, 2, 3, names=True)
    np.save(tmp_path / "picture_name.npy", np.zeros(2))
    with pytest.raises(DataError, match=r"picture_name\.npy: is float64 \(2,\), not"):
        Annotations.read(tmp_path, 2, 2, 3, names=True)


def test_a_set_without_boxes(tmp_path):
    read_coco(written(tmp_path, {**CONTENT, "annotations": []})).write(tmp_path)
    assert Annotations.read(tmp_path, 2, 2, 0).box_xywh.shape == (0, 4)


@pytest.mark.parametrize(
    ("entry", "key", "value", "message"),
    [
        (("images", 1), "id", 90, "images[1]: 'id' is 90, but must be one that no entry before has"),
        (("images", 0), "height", 0, "images[0]: 'height' is 0, but must be above 0"),
        (("images", 0), "width", -3, "images[0]: 'width' is -3, but must be 0 or more"),
        (("images", 0), "id", "a", "images[0]: 'id' is 'a', but must be an integer"),
        (("categories", 1), "id", 3, "categories[1]: 'id' is 3, but must be one that no entry before has"),
        (("annotations", 2), "category_id", 1, "annotations[2]: 'category_id' is 1, but must be an id of categories"),
        (("annotations", 2), "category_id", True, "annotations[2]: 'category_id' is True, but must be an integer"),
        (("annotations", 0), "image_id", 8, "annotations[0]: 'image_id' is 8, but must be an id of images"),
        (("annotations", 0), "image_id", 2**70, f"annotations[0]: 'image_id' is {2**70}, but must be an integer"),
        (
            ("annotations", 1),
            "bbox",
            [1, 2, -3, 4],
            "annotations[1]: 'bbox' is [1, 2, -3, 4], but must be of a width and height of 0 or more",
        ),
        (
            ("annotations", 1),
            "bbox",
            [1, 2, float("nan"), 4],
            "annotations[1]: 'bbox' is [1, 2, nan, 4], but must be finite",
        ),
        (
            ("annotations", 1),
            "bbox",
            [1, 2, 3],
            "annotations[1]: 'bbox' is [1, 2, 3], but must be a list of 4 numbers",
        ),
        (
            ("annotations", 1),
            "bbox",
            [1, 2, "3", 4],
            "annotations[1]: 'bbox' is [1, 2, '3', 4], but must be a list of 4 numbers",
        ),
        (("annotations", 0), "area", -1, "annotations[0]: 'area' is -1, but must be 0 or more"),
        (("annotations", 0), "area", float("inf"), "annotations[0]: 'area' is inf, but must be finite"),
        (("annotations", 0), "area", None, "annotations[0]: 'area' is None, but must be a number"),
        (("annotations", 0), "iscrowd", 2, "annotations[0]: 'iscrowd' is 2, but must be 0 or 1"),
    ],
)
def test_bad_values_are_named_with_their_place(tmp_path, entry, key, value, message):
    content = copy.deepcopy(CONTENT)
    name, number = entry
    content[name][number][key] = value
    path = written(tmp_path, content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}: {message}')}$"):
        read_coco(path)


def test_a_missing_key_is_named(tmp_path):
    content = copy.deepcopy(CONTENT)
    del content["annotations"][1]["iscrowd"]
    with pytest.raises(DataError, match=r"annotations\[1\]: 'iscrowd' is missing"):
        read_coco(written(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"images": [', "cannot be read as JSON"),
        ("[]", "has no list 'images' of objects"),
        ({**CONTENT, "categories": {}}, "has no list 'categories' of objects"),
        ({**CONTENT, "annotations": [1]}, "has no list 'annotations' of objects"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_coco(written(tmp_path, content))


def test_a_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_coco(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read"):
        Annotations.read(tmp_path, 2, 2, 3)


def test_columns_of_another_set_or_cut_off_are_refused(tmp_path):
    read_coco(written(tmp_path, CONTENT)).write(tmp_path)
    with pytest.raises(DataError, match=r"box_picture.npy: is int64 \(3,\), not int64 \(4,\)"):
        Annotations.read(tmp_path, 2, 2, 4)
    file = tmp_path / "box_xywh.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"box_xywh.npy: cannot be read"):
        Annotations.read(tmp_path, 2, 2, 3)
