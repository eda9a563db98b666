"""Small published encodings, written with pyarrow, numpy and tarfile only."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch

from benchmarks.flux1.prepare import prepare
from common.data.synthetic import mark

SIZES = {"text_length": 3, "text_width": 5, "caption_width": 4, "latent_channels": 2, "latent_size": 4}
SHAPES = {"t5": (3, 5), "clip": (4,), "mean": (2, 4, 4), "logvar": (2, 4, 4)}
COLUMNS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}
FIRSTS = {"t5": 0.0, "clip": 0.25, "mean": 0.5, "logvar": -0.5}
COUNTS = {"train": 22, "eval": 11}
FOLDERS = {"train": "cc12m_preprocessed", "eval": "coco_preprocessed"}
EMPTY = {"t5": 300.0, "clip": 301.0}
FORMS = ("arrow", "large", "tar")


def array(name: str, number: int) -> torch.Tensor:
    """Return an array of sample ``number``: its first value is the number, plus that of ``FIRSTS``."""
    values = torch.linspace(0, 1, int(np.prod(SHAPES[name]))).reshape(SHAPES[name])
    return (values + number + FIRSTS[name]).to(torch.bfloat16)


def stream(values: torch.Tensor) -> bytes:
    """Return a ``.npy`` of the bits of a bf16 array."""
    file = io.BytesIO()
    np.save(file, values.view(torch.int16).numpy().view(np.uint16))
    return file.getvalue()


def rows_of(split: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return samples as rows of the published data set; those to train on have no timestep."""
    return [
        {"__key__": f"{number:09d}"}
        | {column: stream(array(name, number)) for name, column in COLUMNS.items()}
        | {"timestep": (5 * number + 3) % 8 if split == "eval" else None}
        for number in numbers
    ]


def write_arrow(path: Path, rows: list[dict[str, Any]], kind: pyarrow.DataType, batch: int = 3) -> None:
    """Write a shard with record batches of ``batch`` rows, without a column that no row has."""
    columns = {"__key__": pyarrow.string(), **dict.fromkeys(COLUMNS.values(), kind), "timestep": pyarrow.int32()}
    schema = pyarrow.schema([(name, columns[name]) for name in columns if any(name in row for row in rows)])
    with pyarrow.ipc.new_stream(str(path), schema) as writer:
        writer.write_table(pyarrow.Table.from_pylist(rows, schema), batch)


def write_tar(path: Path, rows: list[dict[str, Any]], first: int) -> None:
    """Write a shard as a tar, whose keys count from ``first``."""
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows, first):
            about = {"key": row["__key__"]}
            if row.get("timestep") is not None:
                about["timestep"] = row["timestep"]
            members = {"json": json.dumps(about).encode()}
            members |= {f"{name}.bytes": row[column] for name, column in COLUMNS.items() if column in row}
            for suffix, content in members.items():
                member = tarfile.TarInfo(f"{number:08d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_split(folder: Path, split: str, form: str = "arrow", shards: int = 3, rows: Any = None) -> list[Path]:
    """Write the shards of a split; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(split, range(COUNTS[split])) if rows is None else rows
    names, first = [], 0
    for number, numbers in enumerate(np.array_split(np.arange(len(rows)), shards)):
        part = [rows[index] for index in numbers]
        if form == "tar":
            names.append(f"shard_{number:06d}.tar")
            write_tar(folder / names[-1], part, first)
        else:
            names.append(f"data-{number:05d}-of-{shards:05d}.arrow")
            write_arrow(folder / names[-1], part, pyarrow.large_binary() if form == "large" else pyarrow.binary())
        first += len(part)
    if form != "tar":
        state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "5", "_split": "train"}
        (folder / "state.json").write_text(json.dumps(state))
    return [folder / name for name in names]


def write_raw(folder: Path, form: str = "arrow") -> Path:
    """Write both splits and the encodings of the empty caption, marked as synthetic; return the folder."""
    for split, name in FOLDERS.items():
        write_split(folder / name, split, form)
    (folder / "empty_encodings").mkdir()
    for name, value in EMPTY.items():
        np.save(folder / "empty_encodings" / f"{name}_empty.npy", np.full((1, *SHAPES[name]), value, np.float16))
    mark(folder, SIZES)
    return folder


def prepared(folder: Path, form: str = "arrow") -> Path:
    """Return a prepared folder below ``folder``."""
    prepare(write_raw(folder / "raw", form), folder / "data")
    return folder / "data"
