"""Commands that generate, prepare and verify CosmoFlow's data, as files of one sample each.

``prepare`` writes TFRecords without compression, each with an index for DALI, from any layout of
:mod:`benchmarks.cosmoflow.raw`. ``prepare --adopt`` links files that exist already in one of the formats of
:mod:`benchmarks.cosmoflow.samples`, for example gzipped TFRecords, which take about a sixth of the space.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from benchmarks.cosmoflow import raw
from benchmarks.cosmoflow.raw import RawData, RawFile
from benchmarks.cosmoflow.samples import (
    CUBE_SUFFIX,
    FORMAT,
    LIST,
    PARAMETERS,
    PREPARE_COMMAND,
    RECORD_SUFFIX,
    REDSHIFTS,
    REMEDY,
    SPLITS,
    Split,
    cube_bytes,
    edge_of_file,
    label_of,
    read_list,
)
from benchmarks.cosmoflow.synthetic import generate
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest
from common.data.preparation import link_or_copy_all, preparing, read_all
from common.data.published import Published
from common.data.stages import Stages
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import tfrecord
from common.formats.raw_files import listed
from common.untrusted.regular_file import size_of

Sizes = dict[str, dict[str, int]]
"""Bytes of each file by split and name."""
RECORDS, STAGE = "records", "samples"
TASK = 64  # files per task; a universe is a task of its own
MEMORY_PER_WORKER = 1 << 30
"""Bytes of memory for a quarter of a universe, and a sample."""
PUBLISHED = Published({"train_samples": 524_288, "eval_samples": 65_536, "size": 128})


def prepare(raw_dir: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Write the prepared data set. Skip complete data and continue interrupted preparations.

    Args:
        raw_dir: one of the layouts of :mod:`benchmarks.cosmoflow.raw`.

    Raises:
        DataError: raw data are missing, incomplete or damaged, or have cubes of several sizes; the disk is too small;
            ``data_dir`` has data of another source, or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    wanted = {"fingerprint": source.fingerprint()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        job.begin(RECORDS)
        _, size, _ = next(source.splits["train"][0].samples())
        sizes = _write_samples(source, data_dir, size, workers)
        return job.finish(*_describe(data_dir, sizes, size), "N-body simulations of ExaLearn")


def adopt(folder: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Link the samples in ``folder`` into ``data_dir``, check and describe them.

    Args:
        folder: has ``train`` and ``validation`` with files of one sample each: TFRecords, with or without gzip, or
            pairs of ``.npy`` files.
        data_dir: receives links, or copies on another disk; may be ``folder``.
        workers: samples that are read at a time.

    Raises:
        DataError: a split has no sample, a sample is damaged or of another size than the first, or ``data_dir`` has
            other data.
    """
    found = {split: _samples_in(folder / name) for split, name in SPLITS.items()}
    sizes = {split: {path.name: path.stat().st_size for path in paths} for split, paths in found.items()}
    wanted = {"fingerprint": hashlib.sha256(repr(sizes).encode()).hexdigest()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, description_of(folder), folder) as job:
        if job.found is not None:
            return job.found
        size = edge_of_file(found["train"][0])
        linked = [
            (path, data_dir / SPLITS[split] / path.name)
            for split, samples in found.items()
            for sample in samples
            for path in (sample, *_beside(sample))
        ]
        link_or_copy_all(linked, data_dir, "delete it or name another --data-dir")
        described = _describe(data_dir, sizes, size)
        for name in SPLITS.values():
            _check(data_dir / name, size, workers)
        return job.finish(*described, "N-body simulations of ExaLearn, prepared by other tools")


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Compare the lists of ``data_dir`` with the manifest, and every sample with its checksums and its index.

    Pairs of ``.npy`` files have no checksum: their types, shapes and sizes are compared.

    Args:
        workers: samples that are read at a time.

    Raises:
        DataError: a file is missing, changed or damaged; the message names the first one.
    """
    found = manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)
    for name in SPLITS.values():
        _check(data_dir / name, found.counts["size"], workers)
    return found


def _check(folder: Path, size: int, workers: int) -> None:
    """Read every sample of a split and its index once; raises :class:`DataError` for the first that is wrong."""
    files = read_list(folder / LIST)
    split = Split(folder, files, size, "buffered", checksums=True)

    def label_bytes(name: str) -> int:
        return size_of(folder / label_of(name), REMEDY) if name.endswith(CUBE_SUFFIX) else 0

    first = files[0][0]
    expected = label_bytes(first)

    def read(number: int) -> None:
        split.read(number, torch.empty((*[size] * 3, REDSHIFTS), dtype=torch.int16), torch.empty(PARAMETERS))
        name, length = files[number]
        if label_bytes(name) != expected:
            raise DataError(f"{folder / label_of(name)} has another size than {label_of(first)}; {REMEDY}")
        if (index := folder / f"{name}{tfrecord.INDEX_SUFFIX}").exists():
            try:
                tfrecord.check_index(index, [(0, length)])
            except ValueError as error:
                raise DataError(f"{folder / name}: {error}; delete the index or prepare the data again") from error

    read_all(read, range(len(files)), workers, f"read {folder.name}")


def _write_samples(source: RawData, data_dir: Path, size: int, workers: int) -> Sizes:
    """Write the samples of all tasks without a record; return the sizes of all files."""
    tasks: dict[str, tuple[list[RawFile], Path, int]] = {}
    for split, files in source.splits.items():
        step = 1 if files[0].universe else TASK
        for first in range(0, len(files), step):
            tasks[f"{split}-{first:06d}"] = (files[first : first + step], data_dir / SPLITS[split], size)
    sizes: Sizes = {split: {} for split in SPLITS}
    with Stages(data_dir / RECORDS, workers) as stages:
        left = [file for name, (files, *_) in tasks.items() if stages.record(STAGE, name) is None for file in files]
        samples = sum(len(file.names) for file in left)
        preparation.require_space(data_dir, samples * (cube_bytes(size) + tfrecord.FRAME_BYTES))
        for name, record in stages.run(STAGE, tasks, write_samples).items():
            sizes[name.partition("-")[0]] |= record
    return sizes


def write_samples(files: list[RawFile], folder: Path, size: int) -> dict[str, int]:
    """Write the samples of ``files`` and their indexes to ``folder``; return the sizes of the samples' files by name.

    Args:
        size: required edge of the cubes in voxels.

    Raises:
        DataError: a file is damaged, or its cubes have another size.
    """
    sizes = {}
    for file in files:
        for name, edge, content in file.samples():
            if edge != size:
                raise DataError(
                    f"{file.path}: {name} has {edge}^3 voxels, the first sample {size}^3; all must have the same size"
                )
            with atomic.written(folder / name) as unfinished:
                unfinished.write_bytes(content)
            atomic.write_text(folder / f"{name}{tfrecord.INDEX_SUFFIX}", tfrecord.index_text([(0, len(content))]))
            sizes[name] = len(content)
    return sizes


def _describe(data_dir: Path, sizes: Sizes, size: int) -> tuple[dict[str, FileEntry], dict[str, int]]:
    """Write the lists of both splits; return the files and counts of the manifest."""
    for split, files in sizes.items():
        lines = (f"{name} {length}\n" for name, length in files.items())
        atomic.write_text(data_dir / SPLITS[split] / LIST, "".join(lines))
    entries = manifest.describe_files(data_dir, [f"{folder}/{LIST}" for folder in SPLITS.values()])
    return entries, {**{f"{split}_samples": len(files) for split, files in sizes.items()}, "size": size}


def _samples_in(folder: Path) -> list[Path]:
    """Return the samples of a split that other tools prepared: TFRecords, or else cubes of ``.npy`` pairs."""
    found = listed(folder, f"*{RECORD_SUFFIX}") or listed(folder, f"*{CUBE_SUFFIX}")
    if not found:
        raise DataError(f"{folder} has no samples: neither *{RECORD_SUFFIX} nor *{CUBE_SUFFIX}")
    return found


def _beside(path: Path) -> list[Path]:
    """Return the other files of a sample: the parameters of a cube, or the index of a TFRecord, if there is one."""
    if path.name.endswith(CUBE_SUFFIX):
        return [path.with_name(label_of(path.name))]
    index = path.with_name(path.name + tfrecord.INDEX_SUFFIX)
    return [index] if index.exists() else []


COMMANDS = DataCommands(
    "cosmoflow",
    raw="TFRecords or universes",
    prepared="prepared samples",
    real="the N-body simulations",
    generate=generate,
    prepare=prepare,
    verify=verify,
    adopt=adopt,
    published=PUBLISHED,
    memory_per_worker=MEMORY_PER_WORKER,
)
