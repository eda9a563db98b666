"""Download, prepare, verify and generate the data of FLUX.1: the published encodings, and an index of their arrays.

The input format is :mod:`benchmarks.flux1.raw`, the output format :mod:`benchmarks.flux1.encodings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.flux1 import raw
from benchmarks.flux1.encodings import (
    EMPTY,
    FORMAT,
    INDEX,
    PREPARE_COMMAND,
    PUBLISHED_SIZES,
    SPLITS,
    TIMESTEPS,
    EncodingSizes,
    counts_of,
    index_shard,
    read_empty,
    timesteps_of,
)
from benchmarks.flux1.synthetic import generate
from common.config.loading import build
from common.data import atomic, manifest
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest, file_entry
from common.data.preparation import link_or_copy, preparing
from common.data.published import Published, published_files
from common.data.sources import read_sources
from common.data.stages import Stages
from common.errors import DataError

RECORDS, STAGE = "records", "files"
PUBLISHED = Published(
    counts_of(1_099_776, 29_696, PUBLISHED_SIZES), published_files(read_sources("flux1")["empty"].files)
)


def prepare(raw_dir: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Link the published files into the prepared folder and index them; do nothing if that is complete.

    Every array is read once, and must be finite. After an interruption, it continues with the files that are left.

    Args:
        raw_dir: folder in the layout of :mod:`benchmarks.flux1.raw`.
        data_dir: receives hard links, or copies on another disk.
        workers: processes that read files.

    Raises:
        DataError: raw data are missing, incomplete or damaged, the disk is too small for copies, ``data_dir`` has data
            of another source, or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    sizes = sizes_of(source)
    read_empty(source.empty, sizes)
    with preparing(
        data_dir, FORMAT, PREPARE_COMMAND, {"fingerprint": source.fingerprint()}, PUBLISHED, source.synthetic
    ) as job:
        if job.found is not None:
            return job.found
        records_dir = job.begin(RECORDS)
        tasks = {
            f"{split}-{number:05d}": (path, data_dir, records_dir, split, number, sizes)
            for split, paths in source.files.items()
            for number, path in enumerate(paths)
        }
        with Stages(records_dir, workers) as stages:
            records = stages.run(STAGE, tasks, prepare_file)
        for name in EMPTY.values():
            link_or_copy(source.empty / name, data_dir / name, "delete it or name another --data-dir")
        made = [*EMPTY.values(), *_write_indexes(data_dir, records_dir, list(records))]
        files = {record["name"]: FileEntry(record["bytes"], record["sha256"]) for record in records.values()}
        files |= manifest.describe_files(data_dir, made, job.published.with_md5)
        samples = {
            split: sum(record["samples"] for task, record in records.items() if task.startswith(f"{split}-"))
            for split in SPLITS
        }
        return job.finish(
            files, counts_of(samples["train"], samples["eval"], sizes), "encodings of CC12M and COCO 2014"
        )


def sizes_of(source: raw.RawEncodings) -> EncodingSizes:
    """Return the sizes of the arrays: those of the benchmark, or those in the description of synthetic data."""
    if source.synthetic is None:
        return PUBLISHED_SIZES
    names = EncodingSizes.__dataclass_fields__
    sizes: EncodingSizes = build(
        EncodingSizes, {name: value for name, value in source.synthetic.items() if name in names}, "sizes"
    )
    return sizes


def prepare_file(
    path: Path, data_dir: Path, records_dir: Path, split: str, number: int, sizes: EncodingSizes
) -> dict[str, Any]:
    """Link, check and index one published file; return the record of the task.

    Raises:
        DataError: the file is damaged, or an array has another dtype or shape or values that are not finite.
    """
    offsets_S4 = index_shard(path, sizes)
    _require_finite(path, offsets_S4, sizes)
    atomic.save(records_dir / f"{split}-{number:05d}.npy", offsets_S4)
    if split == "eval":
        timesteps = timesteps_of(path)
        atomic.save(records_dir / f"{split}-{number:05d}.{TIMESTEPS}", timesteps)
    name = f"{SPLITS[split]}/{number:05d}{path.suffix}"
    link_or_copy(path, data_dir / name, "delete it or name another --data-dir")
    entry = file_entry(data_dir / name)
    return {"name": name, "samples": len(offsets_S4), "bytes": entry.bytes, "sha256": entry.sha256}


def _require_finite(path: Path, offsets_S4: np.ndarray, sizes: EncodingSizes) -> None:
    with open(path, "rb") as file:
        for row, offsets in enumerate(offsets_S4.tolist()):
            for (name, shape), offset in zip(sizes.shapes.items(), offsets, strict=True):
                file.seek(offset)
                content = bytearray(file.read(2 * int(np.prod(shape))))
                if not torch.frombuffer(content, dtype=torch.bfloat16).isfinite().all():
                    raise DataError(f"{path}: {name} of sample {row} has values that are not finite; fetch it again")


def _write_indexes(data_dir: Path, records_dir: Path, tasks: list[str]) -> list[str]:
    """Write the index of each split, and the timesteps; return their names."""
    made = []
    for split, folder in SPLITS.items():
        mine = [task for task in tasks if task.startswith(f"{split}-")]
        parts = [np.load(records_dir / f"{task}.npy") for task in mine]
        numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        atomic.save(data_dir / folder / INDEX, np.column_stack([numbers, np.concatenate(parts)]))
        made.append(f"{folder}/{INDEX}")
        if split == "eval":
            timesteps = np.concatenate([np.load(records_dir / f"{task}.{TIMESTEPS}") for task in mine])
            atomic.save(data_dir / folder / TIMESTEPS, timesteps)
            made.append(f"{folder}/{TIMESTEPS}")
    return made


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Compare all files of ``data_dir`` with their checksums, ``workers`` files at a time; this reads all data.

    Raises:
        DataError: a file is missing or changed; the message names the first.
    """
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND, workers)


COMMANDS = DataCommands(
    "flux1",
    raw="published encodings of captions and pictures",
    prepared="prepared encodings",
    real="CC12M and COCO 2014, encoded",
    generate=generate,
    prepare=prepare,
    verify=verify,
    published=PUBLISHED,
)
"""The data commands of FLUX.1."""
