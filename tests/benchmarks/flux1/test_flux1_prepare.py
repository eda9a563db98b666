"""Preparation from published encodings: what it writes, how it continues, and one clear error for each fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import small_encodings
import torch
from small_encodings import FOLDERS, write_arrow, write_raw, write_split

from benchmarks.flux1 import prepare as module
from benchmarks.flux1.prepare import COMMANDS, prepare
from common.data.synthetic import MARKER
from common.errors import ConfigError, DataError


def train_folder(raw: Path) -> Path:
    return raw / FOLDERS["train"]


def eval_folder(raw: Path) -> Path:
    return raw / FOLDERS["eval"]


@pytest.mark.parametrize("form", small_encodings.FORMS)
def test_published_files_are_linked_in_order_and_described(form, tmp_path):
    raw = write_raw(tmp_path / "raw", form)
    made = prepare(raw, tmp_path / "data")
    assert made.counts == {"train_samples": 22, "eval_samples": 11, **small_encodings.SIZES}
    assert made.synthetic
    assert COMMANDS.verify(tmp_path / "data").files == made.files
    for folder, split in (("train", "train"), ("validation", "eval")):
        published = sorted(path for path in (raw / FOLDERS[split]).iterdir() if path.suffix in (".arrow", ".tar"))
        linked = sorted(path for path in (tmp_path / "data" / folder).iterdir() if path.suffix != ".npy")
        assert [path.stat().st_ino for path in published] == [path.stat().st_ino for path in linked]
        assert {f"{folder}/{path.name}" for path in linked} < made.files.keys()


def test_the_order_of_state_json_counts(tmp_path):
    raw = write_raw(tmp_path / "raw")
    state = train_folder(raw) / "state.json"
    content = json.loads(state.read_text())
    content["_data_files"].reverse()
    state.write_text(json.dumps(content))
    prepare(raw, tmp_path / "data")
    first = (train_folder(raw) / "data-00002-of-00003.arrow").stat().st_ino
    assert (tmp_path / "data" / "train" / "00000.arrow").stat().st_ino == first


def test_an_interrupted_preparation_continues(tmp_path, monkeypatch):
    raw, data = write_raw(tmp_path / "raw"), tmp_path / "data"
    done: list[str] = []

    def interrupted(path: Path, *arguments: Any) -> dict[str, Any]:
        if len(done) == 4:
            raise DataError("interrupted")
        done.append(path.name)
        return record(path, *arguments)

    record = module.link_file
    monkeypatch.setattr(module, "link_file", interrupted)
    with pytest.raises(DataError, match="interrupted"):
        prepare(raw, data)
    assert not (data / "manifest.json").exists()
    done.clear()
    assert prepare(raw, data).counts["train_samples"] == 22
    assert len(done) == 2
    assert prepare(raw, data).counts["eval_samples"] == 11  # is complete


def test_files_of_another_disk_need_space_before_the_first_is_copied(tmp_path, monkeypatch):
    raw, data = write_raw(tmp_path / "raw"), tmp_path / "data"
    real = Path.stat

    def stat(path: Path, **options: bool) -> Any:
        """Return the status of a file, and for arrow files another device and a size of 1 TB."""
        found = real(path, **options)
        return SimpleNamespace(st_dev=found.st_dev + 1, st_size=10**12) if path.suffix == ".arrow" else found

    source = module.open_raw(raw)
    monkeypatch.setattr(module, "open_raw", lambda raw_dir: source)
    monkeypatch.setattr(type(source), "fingerprint", lambda self: "1")
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5 * 10**12))
    with pytest.raises(DataError, match=r"data needs 6000\.0 GB more; its disk has 5000\.0 GB left"):
        prepare(raw, data)
    assert not (data / "train").exists()


def test_other_raw_data_are_refused(tmp_path):
    prepare(write_raw(tmp_path / "raw"), tmp_path / "data")
    with pytest.raises(DataError, match="was prepared from other raw data"):
        prepare(write_raw(tmp_path / "other", "tar"), tmp_path / "data")


def test_verify_names_a_changed_file(tmp_path):
    root = small_encodings.prepared(tmp_path)
    with open(root / "validation" / "00001.arrow", "r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DataError, match=r"validation/00001\.arrow: SHA-256"):
        COMMANDS.verify(root)


def test_published_encodings_are_used_completely(tmp_path):
    with pytest.raises(ConfigError, match="--train=5 --eval=29696 --device=auto: only with --encoders"):
        prepare(tmp_path, tmp_path / "data", train=5)
    with pytest.raises(ConfigError, match="--device=cpu: only with --encoders"):
        prepare(tmp_path, tmp_path / "data", device="cpu")


def cut(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def cut_at_a_batch(raw: Path) -> None:
    """Cut an arrow file behind a complete record batch, where Arrow's own reader sees the end of the stream."""
    path = train_folder(raw) / "data-00001-of-00003.arrow"
    cut(path, path.stat().st_size - 8)


def with_array(name: str, array: np.ndarray | torch.Tensor | bytes) -> Callable[[Path], None]:
    """Return a function that replaces an array of training sample 4."""

    def change(raw: Path) -> None:
        rows = small_encodings.rows_of("train", range(22))
        if isinstance(array, torch.Tensor):
            rows[4][small_encodings.COLUMNS[name]] = small_encodings.stream(array)
        elif isinstance(array, bytes):
            rows[4][small_encodings.COLUMNS[name]] = array
        else:
            path = raw / "array.npy"
            np.save(path, array)
            rows[4][small_encodings.COLUMNS[name]] = path.read_bytes()
        write_split(
            train_folder(raw),
            "train",
            "tar" if (train_folder(raw) / "shard_000000.tar").exists() else "arrow",
            rows=rows,
        )

    return change


def without(split: str, column: str) -> Callable[[Path], None]:
    """Return a function that removes a column of an arrow file, or the value of one sample in a tar."""

    def change(raw: Path) -> None:
        rows = small_encodings.rows_of(split, range(small_encodings.COUNTS[split]))
        tar = (raw / FOLDERS[split] / "shard_000000.tar").exists()
        for row in rows[5:6] if tar else rows:
            del row[column]
        write_split(raw / FOLDERS[split], split, "tar" if tar else "arrow", rows=rows)

    return change


def timestep(value: float | None) -> Callable[[Path], None]:
    """Return a function that gives validation sample 5 another timestep."""

    def change(raw: Path) -> None:
        rows = small_encodings.rows_of("eval", range(11))
        rows[5]["timestep"] = value
        tar = (eval_folder(raw) / "shard_000000.tar").exists()
        write_split(eval_folder(raw), "eval", "tar" if tar else "arrow", rows=rows)

    return change


def impossible_offsets(raw: Path) -> None:
    """Replace the offset of the second value of a column by one beyond the file."""
    path = train_folder(raw) / "data-00000-of-00003.arrow"
    content = path.read_bytes()
    size = len(small_encodings.stream(small_encodings.array("t5", 0)))
    offsets = np.array([0, size, 2 * size, 3 * size], np.int32).tobytes()
    assert content.count(offsets) == 2  # a record batch has three rows, and the file eight
    path.write_bytes(content.replace(offsets, np.array([0, 10**9, 2 * size, 3 * size], np.int32).tobytes()))


def half_a_tar(raw: Path) -> None:
    path = train_folder(raw) / "shard_000001.tar"
    cut(path, path.stat().st_size // 2)


def state_of(*entries: object) -> Callable[[Path], None]:
    """Return a function that replaces the list of the validation set's files."""

    def change(raw: Path) -> None:
        (eval_folder(raw) / "state.json").write_text(json.dumps({"_data_files": entries}))

    return change


def column_twice(raw: Path) -> None:
    """Rename the column ``mean`` of an arrow file to ``logvar``."""
    path = train_folder(raw) / "data-00000-of-00003.arrow"
    table = pyarrow.ipc.open_stream(path.read_bytes()).read_all()
    table = table.rename_columns(["logvar" if name == "mean" else name for name in table.column_names]).append_column(
        "mean", table["mean"]
    )
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def column_that_is_no_text(raw: Path) -> None:
    """Damage the name of a column of an arrow file."""
    path = train_folder(raw) / "data-00000-of-00003.arrow"
    path.write_bytes(path.read_bytes().replace(b"clip_encodings", b"clip_\xff\xfecodings"))


def no_samples(raw: Path) -> None:
    """Write a validation set whose files have no rows."""
    rows = small_encodings.rows_of("eval", range(1))
    write_split(eval_folder(raw), "eval", rows=rows, shards=1)
    path = eval_folder(raw) / "data-00000-of-00001.arrow"
    schema = pyarrow.ipc.open_stream(path.read_bytes()).schema
    with pyarrow.ipc.new_stream(str(path), schema):
        pass


def foreign_tar(raw: Path) -> None:
    tar = train_folder(raw) / "shard_000002.tar"
    (tar.parent / "shard_copy.tar").write_bytes(tar.read_bytes())


NAN = torch.full(small_encodings.SHAPES["mean"], torch.nan, dtype=torch.bfloat16)
WIDE = torch.zeros(3, 6, dtype=torch.bfloat16)
FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no folder": ("arrow", lambda raw: raw.rename(raw.with_name("moved")), "raw folder .* does not exist"),
    "sizes of synthetic data": (
        "arrow",
        lambda raw: (raw / MARKER).write_text('{"text_length": "three"}'),
        "the file SYNTHETIC of the raw data: sizes.text_length=three: expected int",
    ),
    "no split": ("arrow", lambda raw: eval_folder(raw).rename(raw / "x"), "has neither state.json nor shard_"),
    "shard": (
        "arrow",
        lambda raw: (train_folder(raw) / "data-00001-of-00003.arrow").unlink(),
        "cc12m_preprocessed lacks 1 of 3 shards, such as data-00001-of-00003.arrow",
    ),
    "state": (
        "arrow",
        lambda raw: (eval_folder(raw) / "state.json").write_text('{"_data_files": [{"filename": "../a.arrow"}]}'),
        "state.json does not list the files",
    ),
    "a shard twice": (
        "arrow",
        state_of(*[{"filename": "data-00000-of-00003.arrow"}] * 2),
        "state.json lists 2 files, but only 1 different ones",
    ),
    "no entry": (
        "arrow",
        state_of({"filename": "data-00000-of-00003.arrow"}, "data-00001-of-00003.arrow"),
        "state.json does not list the files",
    ),
    "no samples": ("arrow", no_samples, "no samples of the split validation"),
    "a tar is missing": (
        "tar",
        lambda raw: (train_folder(raw) / "shard_000001.tar").unlink(),
        "has shard_000002.tar where shard_000001.tar belongs",
    ),
    "foreign tar": ("tar", foreign_tar, "has shard_copy.tar where shard_000003.tar belongs"),
    "a column twice": ("arrow", column_twice, "data-00000-of-00003.arrow has the column logvar twice"),
    "name of a column": ("arrow", column_that_is_no_text, "data-00000-of-00003.arrow is damaged"),
    "cut arrow": (
        "arrow",
        lambda raw: cut(train_folder(raw) / "data-00001-of-00003.arrow", 3000),
        "data-00001-of-00003.arrow is cut off",
    ),
    "cut arrow at a batch": ("arrow", cut_at_a_batch, "data-00001-of-00003.arrow is cut off"),
    "offsets": ("arrow", impossible_offsets, "data-00000-of-00003.arrow is damaged"),
    "cut tar": ("tar", half_a_tar, "shard_000001.tar.*truncated or damaged"),
    "no column": ("arrow", without("train", "clip_encodings"), "has no column clip_encodings; its columns are __key__"),
    "no member": ("tar", without("train", "clip_encodings"), r"1 of 8 samples have no \.clip\.bytes: 00000005"),
    "shape": (
        "arrow",
        with_array("t5", WIDE),
        r"00000-of-00003.arrow: t5 of sample 4: uint16 \(3, 6\), expected uint16 \(3, 5\)",
    ),
    "shape in a tar": ("tar", with_array("t5", WIDE), r"shard_000000.tar: t5 of sample 4: uint16 \(3, 6\), expected"),
    "dtype": (
        "arrow",
        with_array("mean", np.zeros((2, 4, 4), np.float16)),
        r"mean of sample 4: float16 \(2, 4, 4\), expected uint16 \(2, 4, 4\)",
    ),
    "order": (
        "arrow",
        with_array("mean", np.asfortranarray(np.arange(32, dtype=np.uint16).reshape(2, 4, 4))),
        r"mean of sample 4: .* expected uint16 \(2, 4, 4\) in C order",
    ),
    "no array": ("arrow", with_array("clip", b"bytes"), "clip of sample 4 is no .npy"),
    "short array": (
        "arrow",
        with_array("clip", small_encodings.stream(small_encodings.array("clip", 4))[:-2]),
        r"clip of sample 4 has 134 bytes, but uint16 \(4,\) takes 136",
    ),
    "not finite": ("arrow", with_array("mean", NAN), "mean of sample 4 has values that are not finite"),
    "no empty encodings": (
        "arrow",
        lambda raw: (raw / "empty_encodings" / "clip_empty.npy").unlink(),
        "empty_encodings/clip_empty.npy is missing",
    ),
    "bits of the empty encodings": (
        "arrow",
        lambda raw: np.save(raw / "empty_encodings" / "t5_empty.npy", np.zeros((1, 3, 5), np.uint16)),
        r"t5_empty.npy: uint16 \(1, 3, 5\), expected float16 \(1, 3, 5\)",
    ),
    "empty encodings that are not finite": (
        "arrow",
        lambda raw: np.save(raw / "empty_encodings" / "clip_empty.npy", np.full((1, 4), np.nan, np.float16)),
        "clip_empty.npy has values that are not finite",
    ),
    "no timesteps": ("arrow", without("eval", "timestep"), "has no column timestep; its columns are __key__"),
    "no timestep": ("arrow", timestep(None), "00001-of-00003.arrow: sample 1 has no timestep"),
    "no timestep in a tar": ("tar", timestep(None), "shard_000001.tar: sample 1 has no timestep"),
    "timestep 8": ("arrow", timestep(8), "sample 1 has the timestep 8, outside of 0 to 7"),
    "timestep -1": ("tar", timestep(-1), "sample 1 has the timestep -1, outside of 0 to 7"),
    "timestep 3.0": ("tar", timestep(3.0), "sample 1 has the timestep 3.0, which is not an integer"),
    "a timestep without samples": (
        "arrow",
        lambda raw: write_split(eval_folder(raw), "eval", rows=small_encodings.rows_of("eval", range(7))),
        "validation: no validation sample has the timestep 6; each of 8",
    ),
    "two copies": (
        "arrow",
        lambda raw: write_split(raw / "older" / FOLDERS["eval"], "eval"),
        "are two copies of the same data",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_clear_error(fault, tmp_path):
    form, change, message = FAULTS[fault]
    raw = write_raw(tmp_path / "raw", form)
    change(raw)
    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_compressed_file_is_refused(tmp_path):
    raw = write_raw(tmp_path / "raw")
    path = train_folder(raw) / "data-00000-of-00003.arrow"
    table = pyarrow.ipc.open_stream(path.read_bytes()).read_all()
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"00000-of-00003\.arrow is compressed or has missing values"):
        prepare(raw, tmp_path / "data")


def test_missing_values_are_refused(tmp_path):
    raw = write_raw(tmp_path / "raw")
    rows = small_encodings.rows_of("train", range(8))
    rows[3]["logvar"] = None
    write_arrow(train_folder(raw) / "data-00000-of-00003.arrow", rows, pyarrow.binary())
    with pytest.raises(DataError, match=r"00000-of-00003\.arrow is compressed or has missing values"):
        prepare(raw, tmp_path / "data")


def test_real_data_must_have_the_benchmarks_sizes(tmp_path):
    raw = write_raw(tmp_path / "raw")
    (raw / MARKER).unlink()
    with pytest.raises(DataError, match=r"t5_empty.npy: float16 \(1, 3, 5\), expected float16 \(1, 256, 4096\)"):
        prepare(raw, tmp_path / "data")
