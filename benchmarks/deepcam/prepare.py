"""Commands that generate, prepare and verify DeepCAM's data.

``prepare`` writes pairs of ``.npy`` files, with labels of one byte, from the published HDF5 files
(:mod:`benchmarks.deepcam.raw`). ``prepare --adopt`` links ``.npy`` files that other tools prepared, as pairs or with
the label as last channel (:mod:`benchmarks.deepcam.samples`).
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import torch

from benchmarks.deepcam import raw
from benchmarks.deepcam.samples import (
    CHANNELS,
    DATA,
    FORMAT,
    FUSED,
    LIST,
    PREPARE_COMMAND,
    REMEDY,
    SPLITS,
    STATISTICS,
    SampleReader,
    Size,
    files_of,
    lengths_of,
    read_list,
)
from benchmarks.deepcam.synthetic import generate
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest
from common.data.preparation import link_or_copy_all, preparing, read_all
from common.data.published import Published
from common.data.raw_layout import RawSplits
from common.data.stages import Stages
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import npy
from common.formats.raw_files import listed
from common.untrusted.regular_file import open_regular

Sums = dict[str, dict[str, int]]
"""CRC-32 of each sample by split and name."""
RECORDS, STAGE = "records", "samples"
TASK = 16  # files per task
MEMORY_PER_WORKER = 1 << 28
"""Bytes of memory for a sample and its checks."""
PUBLISHED = Published({"train_samples": 121_266, "eval_samples": 15_158, "height": 768, "width": 1152})


def prepare(raw_dir: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Write the prepared data set. Skip complete data and continue interrupted preparations.

    Args:
        raw_dir: has the layout of :mod:`benchmarks.deepcam.raw`.

    Raises:
        DataError: raw data are missing, incomplete or damaged, or have images of several sizes; the disk is too small;
            ``data_dir`` has data of another source, or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    wanted = {"fingerprint": source.fingerprint()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        job.begin(RECORDS)
        height, width = raw.read_sample(source.splits["train"][0])[1].shape
        sums = _write_samples(source, data_dir, (height, width), workers)
        with atomic.written(data_dir / STATISTICS) as unfinished:
            unfinished.write_bytes(source.content)
        return job.finish(*_describe(data_dir, sums, (height, width)), "CAM5 simulations with labels of TECA")


def adopt(folder: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Link the samples in ``folder`` into ``data_dir``, check and describe them.

    Args:
        folder: has ``train`` and ``validation`` with ``data-*.npy`` and ``label-*.npy``, or ``datalabel-*.npy``, and
            ``stats.h5``.
        data_dir: receives links, or copies on another disk; may be ``folder``.
        workers: samples that are read at a time.

    Raises:
        DataError: the statistics or all samples of a split are missing, a sample is damaged or of another size than
            the first, or ``data_dir`` has other data.
    """
    found = {split: _samples_in(folder / name) for split, name in SPLITS.items()}
    digest = hashlib.sha256(raw.read_statistics(folder))
    digest.update(repr([[(path.name, path.stat().st_size) for path in paths] for paths in found.values()]).encode())
    wanted = {"fingerprint": digest.hexdigest()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, description_of(folder), folder) as job:
        if job.found is not None:
            return job.found
        size = _size_of(found["train"][0])
        sums = {split: _check(paths, size, workers) for split, paths in found.items()}
        paths = [path for firsts in found.values() for first in firsts for path in files_of(first)]
        linked = [(path, data_dir / path.relative_to(folder)) for path in (folder / STATISTICS, *paths)]
        link_or_copy_all(linked, data_dir, "delete it or name another --data-dir")
        return job.finish(*_describe(data_dir, sums, size), "CAM5 simulations, prepared by other tools")


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Compare lists and statistics of ``data_dir`` with the manifest, and every sample with its checksum.

    Args:
        workers: samples that are read at a time.

    Raises:
        DataError: a file is missing, changed or damaged; the message names the first one.
    """
    found = manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)
    lists = [data_dir / folder / LIST for folder in SPLITS.values()]
    sums = {path.with_name(name): value for path in lists for name, value in read_list(path).items()}

    def compare(path: Path) -> None:
        if (value := checksum(path)) != sums[path]:
            raise DataError(f"{path}: CRC-32 {value:08x} where {LIST} says {sums[path]:08x}; {REMEDY}")

    read_all(compare, list(sums), workers)
    return found


def checksum(path: Path) -> int:
    """Return the CRC-32 over the files of the sample whose first file is ``path``."""
    value = 0
    for each in files_of(path):
        with open_regular(each) as file:
            while piece := file.read(1 << 20):
                value = zlib.crc32(piece, value)
    return value


def write_samples(files: list[Path], folder: Path, size: Size) -> dict[str, int]:
    """Write the samples of raw files to ``folder``; return their checksums by name.

    Args:
        size: required size of the images.

    Raises:
        DataError: a file is damaged, or its image has another size.
    """
    sums = {}
    for path in files:
        x_HWC, y_HW = raw.read_sample(path)
        if y_HW.shape != size:
            raise DataError(
                f"{path} has {y_HW.shape[0]} x {y_HW.shape[1]} pixels, the first image {size[0]} x {size[1]}; all must "
                "have the same size"
            )
        first, label = files_of(folder / f"{path.stem}.npy")
        atomic.save(first, x_HWC)
        atomic.save(label, y_HW)
        sums[first.name] = checksum(first)
    return sums


def _write_samples(source: RawSplits, data_dir: Path, size: Size, workers: int) -> Sums:
    """Write the samples of all tasks without a record; return the checksums of all samples."""
    tasks = {
        f"{split}-{first:06d}": (files[first : first + TASK], data_dir / SPLITS[split], size)
        for split, files in source.splits.items()
        for first in range(0, len(files), TASK)
    }
    sums: Sums = {split: {} for split in SPLITS}
    with Stages(data_dir / RECORDS, workers) as stages:
        left = sum(len(files) for name, (files, *_) in tasks.items() if stages.record(STAGE, name) is None)
        each = 2 * npy.HEADER_BYTES + (4 * CHANNELS + 1) * size[0] * size[1]
        preparation.require_space(data_dir, left * each)
        for name, record in stages.run(STAGE, tasks, write_samples).items():
            sums[name.partition("-")[0]] |= record
    return sums


def _describe(data_dir: Path, sums: Sums, size: Size) -> tuple[dict[str, FileEntry], dict[str, int]]:
    """Write the lists of both splits; return the files and counts of the manifest."""
    for split, values in sums.items():
        lines = (f"{name} {value:08x}\n" for name, value in values.items())
        atomic.write_text(data_dir / SPLITS[split] / LIST, "".join(lines))
    entries = manifest.describe_files(data_dir, [STATISTICS, *(f"{folder}/{LIST}" for folder in SPLITS.values())])
    counts = {f"{split}_samples": len(values) for split, values in sums.items()}
    return entries, {**counts, "height": size[0], "width": size[1]}


def _samples_in(folder: Path) -> list[Path]:
    """Return the first files of the samples of a split that other tools prepared."""
    found = listed(folder, f"{DATA}*.npy") or listed(folder, f"{FUSED}*.npy")
    if not found:
        raise DataError(f"{folder} has no samples: neither {DATA}*.npy nor {FUSED}*.npy")
    return found


def _size_of(path: Path) -> Size:
    """Return the size of the image in a sample's first file."""
    try:
        height, width, _ = npy.read_header(path).shape
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no image (H, W, C): {error}; {REMEDY}") from error
    return height, width


def _check(paths: list[Path], size: Size, workers: int) -> dict[str, int]:
    """Read every sample once; return the checksums by name.

    Raises:
        DataError: a sample is damaged or of another size or type, or a value is not finite.
    """
    reader, lengths = SampleReader(paths[0].parent, size, "buffered"), lengths_of(paths[0])

    def read(path: Path) -> int:
        x_HWC, y_HW = torch.empty(*size, CHANNELS), torch.empty(size, dtype=torch.uint8)
        reader.read(path.name, x_HWC, y_HW)
        if lengths_of(path) != lengths:
            raise DataError(f"{path}: labels of another type of numbers than in {paths[0].name}; {REMEDY}")
        if not x_HWC.isfinite().all():
            raise DataError(f"{path}: a value is not finite; {REMEDY}")
        return checksum(path)

    return dict(zip((path.name for path in paths), read_all(read, paths, workers), strict=True))


COMMANDS = DataCommands(
    "deepcam",
    raw="HDF5 files of climate simulations",
    prepared="prepared samples",
    real="the CAM5 simulations",
    generate=generate,
    prepare=prepare,
    verify=verify,
    adopt=adopt,
    published=PUBLISHED,
    memory_per_worker=MEMORY_PER_WORKER,
)
