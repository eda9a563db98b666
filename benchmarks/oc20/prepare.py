"""Commands that generate, prepare and verify the data of OpenCatalyst.

``prepare`` reads trajectories, whose edges it computes, or the LMDB files of the official preprocessing
(:mod:`benchmarks.oc20.raw`), and writes LMDB files (:mod:`benchmarks.oc20.samples`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.oc20 import raw
from benchmarks.oc20.samples import COUNTS, FORMAT, PREPARE_COMMAND, SPLITS, mean_counts
from benchmarks.oc20.synthetic import generate
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest
from common.data.preparation import preparing
from common.data.published import Published
from common.data.raw_layout import RawSplits
from common.data.stages import Record, Stages
from common.formats import lmdb_file, s2ef

RECORDS, STAGE = "records", "structures"
TASK = 8  # trajectories per task, which writes one file; an official LMDB file is a task of its own
EXPANSION = {s2ef.EXTXYZ: 4, s2ef.PACKED: 18, s2ef.LMDB: 1}
"""Estimated bytes of prepared data per byte of raw data."""
MEMORY_PER_WORKER = 1 << 29
"""Bytes of memory for the search of neighbours in a structure."""
PUBLISHED = Published({"train_samples": 2_000_000, "eval_samples": 999_866})


def prepare(raw_dir: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Write the prepared data set. Skip complete data and continue interrupted preparations.

    Args:
        raw_dir: has the layout of :mod:`benchmarks.oc20.raw`.

    Raises:
        DataError: raw data are missing, incomplete or damaged, or a structure has no neighbours; the disk is too small;
            ``data_dir`` has data of another source, or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    wanted = {"fingerprint": source.fingerprint()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        job.begin(RECORDS)
        return job.finish(*_write_samples(source, data_dir, workers), "OpenCatalyst 2020, S2EF")


def write_file(files: Sequence[Path], path: Path) -> Record:
    """Write the structures of raw files to an LMDB file and their counts beside it.

    Returns:
        Size and checksum of both files by suffix (``files``), and the sums of the counts (``counts``).

    Raises:
        DataError: a raw file is damaged, or a structure has no neighbours.
    """
    counts: list[list[int]] = []

    def values() -> Iterator[bytes]:
        for file in files:
            for value, numbers in raw.values(file):
                counts.append(numbers)
                yield value

    with atomic.written(path) as unfinished:
        lmdb_file.write(unfinished, values())
    counts_S4 = np.array(counts, np.int32).reshape(-1, len(COUNTS))
    atomic.save(path.with_suffix(".npy"), counts_S4)
    entries = {suffix: asdict(manifest.file_entry(path.with_suffix(suffix))) for suffix in (".lmdb", ".npy")}
    return {"files": entries, "samples": len(counts), "counts": counts_S4.sum(0, dtype=np.int64).tolist()}


def _write_samples(source: RawSplits, data_dir: Path, workers: int) -> tuple[dict[str, FileEntry], dict[str, int]]:
    """Write the files of all tasks without a record; return the files and counts of the manifest."""
    tasks: dict[str, tuple[Sequence[Path], Path]] = {}
    for split, files in source.splits.items():
        step = 1 if files[0].suffix == s2ef.LMDB else TASK
        for number, first in enumerate(range(0, len(files), step)):
            path = data_dir / SPLITS[split] / f"data.{number:04d}.lmdb"
            tasks[f"{split}-{number:04d}"] = files[first : first + step], path
    with Stages(data_dir / RECORDS, workers) as stages:
        left = [file for name, (files, _) in tasks.items() if stages.record(STAGE, name) is None for file in files]
        preparation.require_space(data_dir, sum(EXPANSION[file.suffix] * file.stat().st_size for file in left))
        records = stages.run(STAGE, tasks, write_file)
    entries = {
        tasks[name][1].with_suffix(suffix).relative_to(data_dir).as_posix(): FileEntry(**entry)
        for name, record in records.items()
        for suffix, entry in record["files"].items()
    }
    counts = {
        f"{split}_samples": sum(record["samples"] for name, record in records.items() if name.startswith(split))
        for split in SPLITS
    }
    trained = np.sum([record["counts"] for name, record in records.items() if name.startswith("train")], axis=0)
    return entries, counts | {f"train_{name}": int(total) for name, total in zip(COUNTS, trained, strict=True)}


def means(made: Manifest, data_dir: Path, **options: object) -> list[str]:
    """Return a line with the mean counts of a training structure, for ``reader.typical`` and beside figures."""
    counts = (f"{mean:.1f} {name}" for name, mean in mean_counts(made).items())
    return [f"{data_dir}: mean counts of a training structure: {', '.join(counts)}"]


COMMANDS = DataCommands(
    "oc20",
    raw="trajectories, or graphs of the official preprocessing",
    prepared="prepared samples",
    real="OpenCatalyst 2020",
    generate=generate,
    prepare=prepare,
    verify=manifest.verification(FORMAT, PREPARE_COMMAND),
    remarks=means,
    published=PUBLISHED,
    memory_per_worker=MEMORY_PER_WORKER,
)
