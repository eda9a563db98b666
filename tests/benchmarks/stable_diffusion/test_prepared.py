"""Indexes of tars: where samples are, and tars that have none to be found."""

from __future__ import annotations

import json
import tarfile

import numpy as np
import pytest

from benchmarks.stable_diffusion.prepared import counts_of, index_tar, open_prepared, write_index
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
def test_an_index_finds_every_member(kind, tmp_path):
    members = members_of(0, 5, kind)
    write_tar(tmp_path / "made.tar", members)

    index = index_tar(tmp_path / "made.tar", kind)

    assert index.dtype == np.int64
    content = (tmp_path / "made.tar").read_bytes()
    found = [(content[at : at + size], content[text : text + length]) for at, size, text, length in index.tolist()]
    assert found == [(members[f"00000000{row}.{kind}"], caption_of(0, row).encode()) for row in range(5)]


def test_samples_are_in_the_tars_order_and_named_up_to_the_first_dot(tmp_path):
    with tarfile.open(tmp_path / "made.tar", "w") as tar:
        for name in ("b.npy", "b.txt", "b.more.npy", "a.txt", "a.npy"):
            path = tmp_path / name
            path.write_bytes(name.encode())
            tar.add(path, f"folder.x/{name}")

    index = index_tar(tmp_path / "made.tar", "npy")

    content = (tmp_path / "made.tar").read_bytes()
    assert [content[at : at + size] for at, size, _, _ in index.tolist()] == [b"b.npy", b"a.npy"]
    assert [content[at : at + size] for _, _, at, size in index.tolist()] == [b"b.txt", b"a.txt"]


def test_a_written_index_is_the_one_that_is_read(tmp_path):
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
def test_a_sample_that_lacks_a_member_is_refused(missing, message, tmp_path):
    members = {name: content for name, content in members_of(0, 5, "npy").items() if name not in missing}
    write_tar(tmp_path / "made.tar", members)
    with pytest.raises(DataError, match=message):
        index_tar(tmp_path / "made.tar", "npy")


def test_a_member_that_comes_twice_is_refused(tmp_path):
    write_tar(tmp_path / "made.tar", members_of(0, 2, "npy"))
    with tarfile.open(tmp_path / "made.tar", "a") as tar:
        (tmp_path / "again").write_bytes(b"")
        tar.add(tmp_path / "again", "000000001.txt")
    with pytest.raises(DataError, match=r"made\.tar has 000000001\.txt twice"):
        index_tar(tmp_path / "made.tar", "npy")


@pytest.mark.parametrize("bytes_left", [400, 3000, 512 * 5])
def test_a_truncated_tar_has_no_index(bytes_left, tmp_path):
    write_tar(tmp_path / "made.tar", members_of(0, 5, "npy"))
    content = (tmp_path / "made.tar").read_bytes()
    (tmp_path / "made.tar").write_bytes(content[:bytes_left])
    with pytest.raises(DataError, match=r"made\.tar: the tar at byte 0 is truncated or damaged"):
        index_tar(tmp_path / "made.tar", "npy")


def test_a_tar_without_samples_or_none_at_all_is_refused(tmp_path):
    write_tar(tmp_path / "made.tar", {})
    with pytest.raises(DataError, match=r"made\.tar has no samples"):
        index_tar(tmp_path / "made.tar", "npy")
    with pytest.raises(DataError, match=r"other\.tar cannot be read: No such file"):
        index_tar(tmp_path / "other.tar", "npy")


@pytest.mark.parametrize(
    "name", ["train/00001.index.npy", "validation/val2014_30k.tsv", "validation/val2014_30k_stats.npz"]
)
def test_a_manifest_names_all_that_a_run_reads(name, tmp_path):
    root = write_prepared(tmp_path / "data")
    content = json.loads((root / "manifest.json").read_text())
    del content["files"][name]
    (root / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"manifest.json names no {name}"):
        open_prepared(root)
