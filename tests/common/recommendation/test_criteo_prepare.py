"""Raw days to prepared files: byte by byte, after interruptions, and what is refused."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from criteo_logs import HOTNESS, LARGEST, ROWS, as_text, expected_files, write_days, write_published

from common.data import manifest, synthetic
from common.data.stages import Stages
from common.errors import DataError
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.shuffle import BYTES_PER_ROW
from common.recommendation.criteo.prepare import prepare, verify
from common.recommendation.criteo.sample_rows import SampleFormat

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

LOGARITHMS = SampleFormat("multi-hot/1", True, "train_data.bin", "val_data.bin", "prepare")
COUNTS = SampleFormat("one-hot/1", False, "train_data.bin", "test_data.bin", "prepare")
MULTI_HOT = Encoding(LOGARITHMS, HOTNESS, (LARGEST,) * 26, LARGEST, 2, None, True)
ONE_HOT = Encoding(COUNTS, (1,) * 26, (40,) * 26, 40, 0, 1009, False)
FEW_ROWS = 20 * BYTES_PER_ROW
"""Memory with which training samples are five pieces, and the evaluation one."""


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteo") / "raw"
    days = write_days(folder)
    synthetic.mark(folder, {"kind": "test"})
    return folder, days


@pytest.mark.parametrize(
    "encoding",
    [
        MULTI_HOT,
        pytest.param(replace(MULTI_HOT, first_id=2**24 - 5), id="ids that float32 rounds"),
        ONE_HOT,
    ],
)
def test_files_are_those_of_the_definition(raw, tmp_path, encoding):
    folder, days = raw
    made = prepare(folder, tmp_path, encoding, 1, FEW_ROWS)
    train, evaluation, rows = expected_files(days, encoding)
    assert (tmp_path / encoding.sample_format.train_file).read_bytes() == train
    assert (tmp_path / encoding.sample_format.eval_file).read_bytes() == evaluation
    assert json.loads(made.source["table_rows"]) == rows
    assert made.counts == {"train_samples": sum(ROWS[:-1]), "eval_samples": 4}
    assert made.synthetic
    assert not (tmp_path / "intermediate").exists()
    assert verify(tmp_path, encoding.sample_format) == made


def test_rounding_changes_ids(raw):
    large = replace(MULTI_HOT, first_id=2**24 - 5)
    assert expected_files(raw[1], large)[0] != expected_files(raw[1], replace(large, rounded=False))[0]


def test_a_preparation_that_is_interrupted_again_and_again_ends_as_any_other(raw, tmp_path, monkeypatch):
    folder, days = raw
    keep, kept, calls = Stages.keep, [], 0

    class Killed(Exception):
        pass

    def keep_or_die(self, stage, task, record):
        if len(kept) == 9:
            raise Killed
        kept.append(stage)
        keep(self, stage, task, record)

    monkeypatch.setattr(Stages, "keep", keep_or_die)
    stages = []
    while True:
        calls += 1
        try:
            prepare(folder, tmp_path, MULTI_HOT, 1, FEW_ROWS * calls)
            break
        except Killed:
            stages += kept
            kept.clear()
    assert calls > 6
    assert len(stages + kept) == 24 + 26 + 2 + 6 + 6 + 1 + 2  # each task once
    train, evaluation, _ = expected_files(days, MULTI_HOT)
    assert (tmp_path / "train_data.bin").read_bytes() == train
    assert (tmp_path / "val_data.bin").read_bytes() == evaluation


def test_what_is_prepared_is_left_alone_and_others_are_refused(raw, tmp_path):
    folder, _ = raw
    first = prepare(folder, tmp_path, ONE_HOT)
    before = (tmp_path / "train_data.bin").stat().st_mtime_ns
    assert prepare(folder, tmp_path, ONE_HOT) == first
    assert (tmp_path / "train_data.bin").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"was prepared with"):
        prepare(folder, tmp_path, ONE_HOT.capped(7))


@pytest.mark.parametrize(
    ("encoding", "rows", "difference"),
    [
        (ONE_HOT, ROWS, ""),
        (ONE_HOT.capped(7), ROWS, "tables have at most 7 rows"),
        (ONE_HOT, (*ROWS[:-1], ROWS[-1] + 9), r"eval_samples is 4, published is \d+"),
        (
            replace(ONE_HOT, sample_format=replace(COUNTS, checksums={"train_data.bin": "0" * 32})),
            ROWS,
            "train_data.bin has the MD5 [0-9a-f]{32}, published is 0{32}",
        ),
    ],
    ids=["the benchmark's", "capped tables", "other samples", "another MD5"],
)
def test_the_manifest_says_how_logs_differ_from_the_benchmarks(tmp_path, monkeypatch, encoding, rows, difference):
    write_days(tmp_path / "raw")
    monkeypatch.setattr("common.recommendation.criteo.preparation.raw_days.PUBLISHED_ROWS", ROWS)
    published = {"train_samples": sum(rows[:-1]), "eval_samples": -(-rows[-1] // 2)}
    monkeypatch.setattr("common.recommendation.criteo.prepare.PUBLISHED_COUNTS", published)
    made = prepare(tmp_path / "raw", tmp_path / "data", encoding)
    assert not made.synthetic
    assert re.fullmatch(difference, made.custom)
    assert verify(tmp_path / "data", encoding.sample_format) == made


@pytest.fixture(scope="module")
def published(raw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "set"
    write_published(folder, raw[1], MULTI_HOT)
    synthetic.mark(folder, {"table_rows": expected_files(raw[1], MULTI_HOT)[2]})
    return folder


def test_the_published_multi_hot_set_makes_the_same_files(raw, published, tmp_path):
    prepare(published, tmp_path, MULTI_HOT, 1, 2 * BYTES_PER_ROW)
    train, evaluation, _ = expected_files(raw[1], MULTI_HOT)
    assert (tmp_path / "train_data.bin").read_bytes() == train
    assert (tmp_path / "val_data.bin").read_bytes() == evaluation


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).hardlink_to(path)
    return target


def test_a_category_outside_its_table_is_named(published, tmp_path):
    folder = copied(published, tmp_path / "raw")
    synthetic_rows = json.loads((folder / synthetic.MARKER).read_text())["table_rows"]
    synthetic_rows[2] = 1
    (folder / synthetic.MARKER).unlink()
    synthetic.mark(folder, {"table_rows": synthetic_rows})
    with pytest.raises(DataError, match=r"day_0_sparse_multi_hot.npz: row \d+ has category \d+ of table C3, of 1 rows"):
        prepare(folder, tmp_path / "data", MULTI_HOT)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("labels", 2, "labels that are neither 0 nor 1"), ("dense", np.inf, "dense features that are not finite")],
)
def test_impossible_values_of_the_multi_hot_set_are_refused(published, tmp_path, name, value, message):
    folder = copied(published, tmp_path / "raw")
    path = folder / f"day_4_{name}.npy"
    values = np.load(path)
    values[1, 0] = value
    path.unlink()
    np.save(path, values)
    with pytest.raises(DataError, match=f"day_4_{name}.npy: among rows .* are {message}"):
        prepare(folder, tmp_path / "data", MULTI_HOT)


def test_verify_finds_counts_below_0(raw, tmp_path):
    made = prepare(raw[0], tmp_path, ONE_HOT)
    rows = np.fromfile(tmp_path / "test_data.bin", np.int32).reshape(4, -1)
    rows[2, 1] = -1
    rows.tofile(tmp_path / "test_data.bin")
    manifest.write(tmp_path, replace(made, files=manifest.describe_files(tmp_path, made.files)))
    with pytest.raises(DataError, match=r"test_data\.bin: among rows 0 to 4 are dense features below 0"):
        verify(tmp_path, COUNTS)


def test_a_compressed_multi_hot_set_is_refused(published, tmp_path):
    folder = copied(published, tmp_path / "raw")
    path = folder / "day_3_sparse_multi_hot.npz"
    arrays = dict(np.load(path))
    path.unlink()
    np.savez_compressed(path, **arrays)
    with pytest.raises(DataError, match=r"day_3_sparse_multi_hot.npz: member 0 is compressed"):
        prepare(folder, tmp_path / "data", MULTI_HOT)


def test_a_multi_hot_set_that_was_cut_off_is_refused(published, tmp_path):
    folder = copied(published, tmp_path / "raw")
    path = folder / "day_3_sparse_multi_hot.npz"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    assert not zipfile.is_zipfile(path)
    with pytest.raises(DataError, match=r"day_3_sparse_multi_hot.npz is no whole set"):
        prepare(folder, tmp_path / "data", MULTI_HOT)


def test_the_one_hot_benchmark_refuses_a_multi_hot_set(published, tmp_path):
    with pytest.raises(DataError, match=r"this benchmark needs the days as text"):
        prepare(published, tmp_path, ONE_HOT)


@pytest.mark.parametrize("form", ["text", "published"])
def test_missing_days_are_named(raw, published, tmp_path, form):
    folder = copied(raw[0] if form == "text" else published, tmp_path / "raw")
    name = "day_7" if form == "text" else "day_7_dense.npy"
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"lacks {name};"):
        prepare(folder, tmp_path / "data", MULTI_HOT)


def test_a_real_day_that_is_not_whole_is_refused(raw, tmp_path):
    folder = copied(raw[0], tmp_path / "raw")
    (folder / synthetic.MARKER).unlink()
    with pytest.raises(DataError, match=r"day_0 has 3 samples and not 195,841,983"):
        prepare(folder, tmp_path / "data", MULTI_HOT)


def days_with_a_count(folder, count):
    """Days of which line 2 of day 5 has ``count`` as I4, and which lack the line feed at their end."""
    days = write_days(folder)
    synthetic.mark(folder, {"kind": "test"})
    days[5][1][1][3] = count
    for number, lines in enumerate(days):
        (folder / f"day_{number}").write_text("".join(map(as_text, lines)).removesuffix("\n"))
    return days


@pytest.mark.parametrize("count", [-3, 2**31 - 3, 2**31 - 2, 2**31 - 1])
def test_a_count_without_a_logarithm_is_refused(tmp_path, count):
    days_with_a_count(tmp_path / "raw", count)
    with pytest.raises(DataError, match=rf"day_5: line 2 has the count {count} as I4, .* fetch it again"):
        prepare(tmp_path / "raw", tmp_path / "data", MULTI_HOT)


@pytest.mark.parametrize(
    ("encoding", "count"),
    [(MULTI_HOT, 2**31 - 4), (ONE_HOT, 2**31 - 1), (ONE_HOT, -3)],
    ids=["largest logarithm", "largest count", "negative count"],
)
def test_other_counts_and_last_lines_without_a_line_feed_are_kept(tmp_path, encoding, count):
    days = days_with_a_count(tmp_path / "raw", count)
    prepare(tmp_path / "raw", tmp_path / "data", encoding)
    train, evaluation, _ = expected_files(days, encoding)
    assert (tmp_path / "data" / encoding.sample_format.train_file).read_bytes() == train
    assert (tmp_path / "data" / encoding.sample_format.eval_file).read_bytes() == evaluation


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 2, "labels that are neither 0 nor 1"),
        (13, 0x7FC00000, "dense features that are not finite"),
        (14 + 4, 9, "row 3 has category 9 of table C3, which has 9 rows"),
    ],
)
def test_verify_finds_impossible_values_that_the_manifest_has_a_checksum_of(raw, tmp_path, word, value, message):
    made = prepare(raw[0], tmp_path, MULTI_HOT)
    rows = np.fromfile(tmp_path / "val_data.bin", np.int32).reshape(4, -1)
    rows[3, word] = value
    rows.tofile(tmp_path / "val_data.bin")
    with pytest.raises(DataError, match=r"SHA-256"):
        verify(tmp_path, LOGARITHMS)
    manifest.write(tmp_path, replace(made, files=manifest.describe_files(tmp_path, made.files)))
    with pytest.raises(DataError, match=message):
        verify(tmp_path, LOGARITHMS)
