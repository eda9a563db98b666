"""Captions and statistics of the evaluation."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from benchmarks.stable_diffusion.prompts import read_prompts, read_reference
from common.errors import DataError

CAPTIONS = ["A red square.", 'A sign that says "stop" twice.', '"Quoted" at once', "grün, 漢字", "a 'b' c"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "validation").mkdir()
    return tmp_path


def write_table(folder, rows, quoting=csv.QUOTE_MINIMAL) -> None:
    with open(folder / "validation/val2014_30k.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting, lineterminator="\n").writerows(rows)


def test_captions_come_in_their_order_with_their_quotation_marks(folder):
    rows = [[100 - number, 3 * number, caption] for number, caption in enumerate(CAPTIONS)]
    write_table(folder, [["image_id", "id", "caption"], *rows])

    assert read_prompts(folder) == CAPTIONS


def test_a_table_is_read_as_its_bytes_say(folder):
    content = 'image_id\tid\tcaption\n391895\t37\tA man with a "red" helmet\n7\t40\t"A ""b"" c"\n'
    (folder / "validation/val2014_30k.tsv").write_text(content)

    assert read_prompts(folder) == ['A man with a "red" helmet', 'A "b" c']


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"val2014_30k\.tsv begins with the columns \[\]"),
        ("id\timage_id\tcaption\n", r"begins with the columns \['id', 'image_id', 'caption'\]"),
        ("image_id\tid\tcaption\n1\t2\n", r"line 2: 2 columns, not 3"),
        ("image_id\tid\tcaption\n1\t2\ta\tb\n", r"line 2: 4 columns, not 3"),
        ("image_id\tid\tcaption\n1\t2\ta\n\n", r"line 3: 0 columns, not 3"),
        ("image_id\tid\tcaption\n1\tx\ta\n", r"line 2: the ids are '1' and 'x', no numbers"),
        ("image_id\tid\tcaption\n1\t2\ta\n3\t2\tb\n", r"line 3: id 2 follows 2, and they have to rise"),
        ("image_id\tid\tcaption\n1\t2\t \n", r"line 2: the caption of picture 1 is empty"),
        ('image_id\tid\tcaption\n1\t2\t"a\n', r"val2014_30k\.tsv cannot be read: unexpected end of data"),
        (b"image_id\tid\tcaption\n1\t2\t\xff\n", r"val2014_30k\.tsv cannot be read: 'utf-8'"),
        (None, r"val2014_30k\.tsv cannot be read: .*No such file"),
    ],
    ids=[
        "empty",
        "column order",
        "too few columns",
        "too many columns",
        "no columns",
        "no number",
        "order",
        "empty caption",
        "quote",
        "no UTF-8",
        "missing",
    ],
)
def test_other_tables_are_refused(content, message, folder):
    path = folder / "validation/val2014_30k.tsv"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        read_prompts(folder)


def test_statistics_are_read(folder):
    mean, covariance = np.arange(3.0), np.diag([1.0, 2.0, 3.0])
    np.savez(folder / "validation/val2014_30k_stats.npz", mu=mean, sigma=covariance)

    found = read_reference(folder)

    assert found.features == 3
    np.testing.assert_array_equal(found.mean_F, mean)
    np.testing.assert_array_equal(found.covariance_FF, covariance)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mu": np.zeros(3)}, "cannot be read as arrays mu and sigma: .*sigma"),
        ({"mu": np.zeros(3), "sigma": np.zeros((3, 4))}, r"sigma is float64 \(3, 4\) where float64 \(3, 3\)"),
        ({"mu": np.zeros((1, 3)), "sigma": np.eye(3)}, r"mu is float64 \(1, 3\) where float64 \(3,\)"),
        ({"mu": np.zeros(3, np.float32), "sigma": np.eye(3)}, r"mu is float32 \(3,\) where float64"),
        ({"mu": np.zeros(3), "sigma": np.full((3, 3), np.nan)}, "sigma has values that are not finite"),
        ({"mu": np.array([{}]), "sigma": np.eye(1)}, "cannot be read as arrays mu and sigma: Object arrays"),
    ],
)
def test_other_statistics_are_refused(arrays, message, folder):
    np.savez(folder / "validation/val2014_30k_stats.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read_reference(folder)


@pytest.mark.parametrize("kept", [0, 10, 100, -1])
def test_statistics_that_are_cut_off_are_refused(kept, folder):
    path = folder / "validation/val2014_30k_stats.npz"
    np.savez(path, mu=np.zeros(3), sigma=np.eye(3))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"val2014_30k_stats\.npz cannot be read"):
        read_reference(folder)


def test_a_single_array_is_no_statistics(folder):
    with open(folder / "validation/val2014_30k_stats.npz", "wb") as file:
        np.save(file, np.eye(3))
    with pytest.raises(DataError, match=r"val2014_30k_stats\.npz cannot be read"):
        read_reference(folder)
