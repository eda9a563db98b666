"""Test indexes of tars, and the captions and statistics of the evaluation."""

from __future__ import annotations

import csv
import json
import tarfile

import numpy as np
import pytest

from benchmarks.stable_diffusion.prepared import (
    counts_of,
    index_of,
    open_prepared,
    read_prompts,
    read_reference,
    write_index,
)
from common.errors import DataError
from tests.benchmarks.stable_diffusion.small_prepared import (
    SAMPLES,
    caption_of,
    members_of,
    npy_member,
    write_prepared,
    write_tar,
)


@pytest.mark.parametrize("kind", ["npy", "pyd", "safetensors"])
def test_an_index_has_offset_and_size_of_every_member(kind, tmp_path):
    members = members_of(0, 5, kind)
    write_tar(tmp_path / "made.tar", members)

    index = index_of(tmp_path / "made.tar", kind)

    assert index.dtype == np.int64
    content = (tmp_path / "made.tar").read_bytes()
    found = [(content[at : at + size], content[text : text + length]) for at, size, text, length in index.tolist()]
    assert found == [(members[f"00000000{row}.{kind}"], caption_of(0, row).encode()) for row in range(5)]


def test_keys_end_at_the_first_dot_and_keep_the_tars_order(tmp_path):
    with tarfile.open(tmp_path / "made.tar", "w") as tar:
        for name in ("b.npy", "b.txt", "b.more.npy", "a.txt", "a.npy"):
            path = tmp_path / name
            path.write_bytes(name.encode())
            tar.add(path, f"folder.x/{name}")

    index = index_of(tmp_path / "made.tar", "npy")

    content = (tmp_path / "made.tar").read_bytes()
    assert [content[at : at + size] for at, size, _, _ in index.tolist()] == [b"b.npy", b"a.npy"]
    assert [content[at : at + size] for _, _, at, size in index.tolist()] == [b"b.txt", b"a.txt"]


def test_written_indexes_equal_the_expected_files(tmp_path):
    root = write_prepared(tmp_path / "data", "npy")
    before = [(root / f"train/0000{number}.index.npy").read_bytes() for number in range(3)]

    counts = [write_index(root, f"train/{number:05d}.tar", "npy") for number in range(3)]

    assert counts == list(SAMPLES)
    assert [(root / f"train/0000{number}.index.npy").read_bytes() for number in range(3)] == before
    prepared = open_prepared(root)
    assert prepared.samples == SAMPLES
    row = prepared.index(2)[7]
    assert (root / prepared.tars[2]).read_bytes()[row[0] :][: row[1]] == npy_member(2, 7)
    expected = counts_of({f"train/{number:05d}.tar": count for number, count in enumerate(counts)}, 2)
    assert json.loads((root / "manifest.json").read_text())["counts"] == expected


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["000000001.txt"], r"made\.tar: 1 of 5 samples have no \.txt: 000000001"),
        (["000000001.npy", "000000003.npy"], r"made\.tar: 2 of 5 samples have no \.npy: 000000001, 000000003"),
    ],
)
def test_a_sample_without_a_member_is_refused(missing, message, tmp_path):
    members = {name: content for name, content in members_of(0, 5, "npy").items() if name not in missing}
    write_tar(tmp_path / "made.tar", members)
    with pytest.raises(DataError, match=message):
        index_of(tmp_path / "made.tar", "npy")


def test_a_repeated_member_is_refused(tmp_path):
    write_tar(tmp_path / "made.tar", members_of(0, 2, "npy"))
    with tarfile.open(tmp_path / "made.tar", "a") as tar:
        (tmp_path / "again").write_bytes(b"")
        tar.add(tmp_path / "again", "000000001.txt")
    with pytest.raises(DataError, match=r"made\.tar has 000000001\.txt twice"):
        index_of(tmp_path / "made.tar", "npy")


@pytest.mark.parametrize("bytes_left", [400, 3000, 512 * 5])
def test_a_truncated_tar_has_no_index(bytes_left, tmp_path):
    write_tar(tmp_path / "made.tar", members_of(0, 5, "npy"))
    content = (tmp_path / "made.tar").read_bytes()
    (tmp_path / "made.tar").write_bytes(content[:bytes_left])
    with pytest.raises(DataError, match=r"made\.tar: the tar at byte 0 is truncated or damaged"):
        index_of(tmp_path / "made.tar", "npy")


def test_empty_and_missing_tars_are_refused(tmp_path):
    write_tar(tmp_path / "made.tar", {})
    with pytest.raises(DataError, match=r"made\.tar has no samples"):
        index_of(tmp_path / "made.tar", "npy")
    with pytest.raises(DataError, match=r"other\.tar cannot be read: No such file"):
        index_of(tmp_path / "other.tar", "npy")


@pytest.mark.parametrize(
    "name", ["train/00001.index.npy", "validation/val2014_30k.tsv", "validation/val2014_30k_stats.npz"]
)
def test_a_manifest_must_list_all_files_of_a_run(name, tmp_path):
    root = write_prepared(tmp_path / "data")
    content = json.loads((root / "manifest.json").read_text())
    del content["files"][name]
    (root / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"manifest.json does not list {name}"):
        open_prepared(root)


CAPTIONS = ["A red square.", 'A sign that says "stop" twice.', '"Quoted" at once', "grün, 漢字", "a 'b' c"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "validation").mkdir()
    return tmp_path


def write_table(folder, rows, quoting=csv.QUOTE_MINIMAL) -> None:
    with open(folder / "validation/val2014_30k.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting, lineterminator="\n").writerows(rows)


def test_captions_keep_order_and_quotation_marks(folder):
    rows = [[100 - number, 3 * number, caption] for number, caption in enumerate(CAPTIONS)]
    write_table(folder, [["image_id", "id", "caption"], *rows])

    assert read_prompts(folder) == CAPTIONS


def test_quotation_marks_are_read_like_pandas_writes_them(folder):
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
        ("image_id\tid\tcaption\n1\tx\ta\n", r"line 2: the ids '1' and 'x' must be numbers"),
        ("image_id\tid\tcaption\n1\t2\ta\n3\t2\tb\n", r"line 3: id 2 follows 2, but ids must increase"),
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
def test_invalid_tables_are_refused(content, message, folder):
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
        ({"mu": np.zeros(3), "sigma": np.zeros((3, 4))}, r"sigma is float64 \(3, 4\), expected float64 \(3, 3\)"),
        ({"mu": np.zeros((1, 3)), "sigma": np.eye(3)}, r"mu is float64 \(1, 3\), expected float64 \(3,\)"),
        ({"mu": np.zeros(3, np.float32), "sigma": np.eye(3)}, r"mu is float32 \(3,\), expected float64"),
        ({"mu": np.zeros(3), "sigma": np.full((3, 3), np.nan)}, "sigma has values that are not finite"),
        ({"mu": np.array([{}]), "sigma": np.eye(1)}, "cannot be read as arrays mu and sigma: Object arrays"),
    ],
)
def test_invalid_statistics_are_refused(arrays, message, folder):
    np.savez(folder / "validation/val2014_30k_stats.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read_reference(folder)


@pytest.mark.parametrize("kept", [0, 10, 100, -1])
def test_truncated_statistics_are_refused(kept, folder):
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
