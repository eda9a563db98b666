"""OpenImages' tables: which boxes are selected, in which order, and what is refused."""

import json

import numpy as np
import pytest

from benchmarks.retinanet import raw
from benchmarks.retinanet.raw import class_names
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import COLUMNS, label, row, write_raw

TREE = label(264)
ROWS = {
    "train": [
        row("b7", label(2), "0.25,0.5,0,1", "1,0,0,0,1"),
        row("a3", TREE, "0,1,0,1"),
        row("a3", label(0), "0.1,0.1,0.2,0.3", "0,0,1,0,0"),
        row("ff", TREE, "0,0.5,0,0.5"),
        row("b7", label(0), "0.5,0.75,0.125,1.0", "0,0,-1,0,0"),
        row("a3", label(1), "0,1,0,0.5"),
        row("c0", label(3), "0,1,0,1"),
    ],
    "validation": [row("d1", label(1), "0,1,0,1")],
}
EMPTY = {"train": {}, "validation": {}}


@pytest.fixture
def source(tmp_path):
    return raw.open_raw(write_raw(tmp_path / "raw", ROWS, EMPTY))


def test_the_list_has_264_classes_from_airplane_to_zucchini():
    names = class_names()
    assert (len(names), len(set(names)), names[0], names[-1]) == (264, 264, "Airplane", "Zucchini")
    assert names[83] == "Egg (Food)"
    assert list(names) == sorted(names, key=str.lower)


def test_pictures_with_a_box_of_the_classes_are_selected_and_sorted(source):
    boxes = source.boxes("train")
    assert boxes.picture == ["a3", "b7"]
    assert boxes.box_picture.tolist() == [0, 0, 1, 1]
    assert boxes.box_class.tolist() == [0, 1, 2, 0]
    assert boxes.edges.tolist() == [
        [0.1, 0.1, 0.2, 0.3],
        [0, 1, 0, 0.5],
        [0.25, 0.5, 0, 1],
        [0.5, 0.75, 0.125, 1],
    ]


def test_a_flag_that_is_unknown_counts_as_set(source):
    group = raw.FLAGS.index("IsGroupOf")
    assert source.boxes("train").flags[:, group].tolist() == [True, False, False, True]
    assert source.boxes("train").flags[2].tolist() == [True, False, False, False, True]


def test_columns_are_found_by_their_names(tmp_path):
    path = tmp_path / "boxes.csv"
    path.write_text(f"XClick1X,{COLUMNS}\n0.5,{row('a', 'x', '0,1,0,0.25')}\n")
    boxes = raw.read_boxes(path, ("x",))
    assert (boxes.picture, boxes.edges.tolist()) == (["a"], [[0, 1, 0, 0.25]])


def test_the_fingerprint_is_of_tables_and_classes(tmp_path, source):
    same = raw.open_raw(write_raw(tmp_path / "same", ROWS, EMPTY))
    assert same.fingerprint() == source.fingerprint()
    more = {**ROWS, "train": [*ROWS["train"], row("e5", label(0), "0,1,0,1")]}
    others = [
        raw.open_raw(write_raw(tmp_path / "more", more, EMPTY)),
        raw.open_raw(write_raw(tmp_path / "two", ROWS, EMPTY, classes=2)),
    ]
    assert len({other.fingerprint() for other in [source, *others]}) == 3


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ("-0.1,0.5,0,1", "XMin -0.1"),
        ("0.5,0.4,0,1", "XMax 0.4"),
        ("0,1,0.9,0.1", "YMin 0.9"),
        ("nan,0.5,0,1", "XMin nan"),
        ("0,0.5,0,inf", "YMax inf"),
    ],
)
def test_a_negative_box_or_one_without_numbers_is_named_by_its_line(tmp_path, edges, message):
    rows = {**ROWS, "train": [*ROWS["train"], row("a3", label(0), edges)]}
    source = raw.open_raw(write_raw(tmp_path / "raw", rows, EMPTY))
    with pytest.raises(DataError, match=rf"oidv6-train-annotations-bbox\.csv, line 9: a box with .*{message}"):
        source.boxes("train")


def test_a_bad_box_of_another_class_is_none_of_ours(tmp_path):
    rows = {**ROWS, "train": [*ROWS["train"], row("a3", TREE, "-1,0,0,0")]}
    assert raw.open_raw(write_raw(tmp_path / "raw", rows, EMPTY)).boxes("train").picture == ["a3", "b7"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ImageID,LabelName\na,b\n", "XMin"),
        (f"{COLUMNS}\na,b,c\n", "cannot be read as OpenImages' boxes"),
        (f"{COLUMNS}\n{row('a', label(0), '0,x,0,1')}\n", "cannot be read as OpenImages' boxes"),
        (f"{COLUMNS}\n{row('a', label(0), ',1,0,1')}\n", "cannot be read as OpenImages' boxes"),
        (f"{COLUMNS}\n{row('../a', label(0), '0,1,0,1')}\n", r"'../a' is no id of a picture"),
        (f"{COLUMNS}\n{row('a', TREE, '0,1,0,1')}\n", "has no box of the benchmark's 3 classes"),
        ("", "cannot be read as OpenImages' boxes"),
    ],
)
def test_other_tables_are_refused(tmp_path, text, message):
    folder = write_raw(tmp_path / "raw", ROWS, EMPTY)
    (folder / raw.SPLITS["validation"]).write_text(text)
    with pytest.raises(DataError, match=rf"validation-annotations-bbox\.csv.*{message}"):
        raw.open_raw(folder).boxes("validation")


def test_a_class_that_no_table_describes_is_named(tmp_path):
    folder = write_raw(tmp_path / "raw", ROWS, EMPTY)
    path = folder / raw.CLASSES
    path.write_text(path.read_text().replace("Antelope", "Okapi"))
    with pytest.raises(DataError, match="has no class 'Antelope', which the benchmark has"):
        raw.open_raw(folder)
    path.write_text(path.read_text() + "/m/zz,Apple\n")
    with pytest.raises(DataError, match="the name came before"):
        raw.open_raw(folder)


@pytest.mark.parametrize("missing", [raw.CLASSES, *raw.SPLITS.values()])
def test_missing_tables_are_named(tmp_path, missing):
    folder = write_raw(tmp_path / "raw", ROWS, EMPTY)
    (folder / missing).unlink()
    with pytest.raises(DataError, match=f"{missing} is missing"):
        raw.open_raw(folder)


def test_a_folder_that_is_not_there_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        raw.open_raw(tmp_path / "none")


@pytest.mark.parametrize("classes", [0, 265, "3", None, True])
def test_the_number_of_synthetic_classes_is_checked(tmp_path, classes):
    folder = write_raw(tmp_path / "raw", ROWS, EMPTY)
    (folder / "SYNTHETIC").write_text(json.dumps({"classes": classes}))
    with pytest.raises(DataError, match=r"'classes' is .*, but must be how many of the 264 classes"):
        raw.open_raw(folder)


def test_real_data_have_all_classes(tmp_path):
    source = raw.open_raw(write_raw(tmp_path / "raw", ROWS, EMPTY, classes=None))
    assert (source.classes, source.synthetic) == (class_names(), None)
    assert source.boxes("train").picture == ["a3", "b7", "c0"]


def test_many_boxes_keep_the_order_of_the_table_within_a_picture(tmp_path):
    random = np.random.default_rng(0)
    pictures, classes = random.integers(0, 50, 3000), random.integers(0, 4, 3000)
    path = tmp_path / "boxes.csv"
    lines = [
        row(f"{picture:04x}", label(class_index), f"{number / 3000:.6f},1,0,1")
        for number, (picture, class_index) in enumerate(zip(pictures, classes, strict=True))
    ]
    path.write_text("\n".join([COLUMNS, *lines]))
    boxes = raw.read_boxes(path, tuple(label(index) for index in range(3)))
    expected = [
        (int(picture), int(class_index), float(f"{number / 3000:.6f}"))
        for number, (picture, class_index) in enumerate(zip(pictures, classes, strict=True))
        if class_index < 3
    ]
    expected.sort(key=lambda entry: entry[0])
    found = [
        (int(boxes.picture[p], 16), c, e)
        for p, c, e in zip(boxes.box_picture, boxes.box_class, boxes.edges[:, 0], strict=True)
    ]
    assert found == expected
