"""Download, prepare, verify and generate the data of 3D U-Net: KiTS19 as resampled volumes in numpy files.

Prepared data are ``case_00000_x.npy`` and ``case_00000_y.npy`` …, ``cases.json``, ``checksum.json`` with the MD5 of
every volume, as written by the reference, and ``manifest.json``. For the processing see
:mod:`benchmarks.unet3d.preprocess`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.unet3d import raw
from benchmarks.unet3d.preprocess import CLASSES, load_scan, preprocess, voxels_of
from benchmarks.unet3d.raw import RawCase, RawScans
from benchmarks.unet3d.synthetic import generate
from benchmarks.unet3d.volumes import CASES, FORMAT, PREPARE_COMMAND, VolumeEntry
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest, file_entry
from common.data.options import Option
from common.data.preparation import link_or_copy_all, preparing
from common.data.published import Published
from common.data.stages import Stages
from common.data.synthetic import MARKER, description_of
from common.errors import DataError
from common.formats import npy
from common.formats.raw_files import listed
from common.untrusted.strict_json import read_json_object

CHECKSUMS = "checksum.json"
RECORDS, STAGE = "records", "cases"
MEMORY_PER_WORKER = 6 << 30
"""Memory in bytes for the largest scan of KiTS19: 1,059 slices of 512 x 512 in float64, and copies."""
VOXELS_PER_WORKER = 64 << 20
"""Voxels of scans that justify an additional process."""
_NAMED = 5  # largest number of files named in a message


@dataclasses.dataclass(frozen=True)
class CaseRecord:
    """A prepared case: shape (D, H, W), original spacing of the scan in mm (None if unknown), and files."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float] | None
    files: dict[str, FileEntry]


def prepare(raw_dir: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Write the prepared data set; do nothing if it exists, and continue after an interruption.

    Args:
        raw_dir: scans, see :mod:`benchmarks.unet3d.raw`.
        data_dir: receives volumes and manifest.
        workers: processes, each of which takes up to ``MEMORY_PER_WORKER``.

    Raises:
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` has data from
            another source or for other crops; or another process is preparing them.
    """
    source = raw.open_raw(raw_dir)
    wanted = {"fingerprint": source.fingerprint(), "settings": json.dumps(dataclasses.asdict(source.settings))}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, published_cases(), source.synthetic) as job:
        if job.found is not None:
            return job.found
        job.begin(RECORDS)
        return job.finish(*_describe(data_dir, _prepare_cases(source, data_dir, workers)), "KiTS19")


def published_cases() -> Published:
    """Return the required numbers of training and evaluation cases of KiTS19.

    Volumes are not compared: their last bits depend on the processor; see ``verify --checksums``.
    """
    uses = [raw.split_of(number) for number in range(raw.LABELLED_CASES)]
    return Published({"train_samples": uses.count("train"), "eval_samples": uses.count("eval")})


def adopt(folder: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Check volumes prepared by the reference's script, link them into ``data_dir``, and describe them.

    Args:
        folder: output of the script: all 420 volumes, or those of any cases together with a file ``SYNTHETIC``. If it
            has a ``checksum.json``, the volumes must match it.
        data_dir: receives links, or copies on another disk; may be ``folder``.
        workers: cases at a time.

    Raises:
        DataError: a volume is missing, damaged, or of a wrong dtype or shape, MD5s differ, or ``data_dir`` has other
            data.
    """
    synthetic = description_of(folder)
    volumes = listed(folder, "*.npy")
    names = [raw.case_name(number) for number in range(raw.LABELLED_CASES)]
    if synthetic is not None:
        names = [name for name in names if any(path.name.startswith(name) for path in volumes)]
        if not names:
            raise DataError(f"{folder} has no volumes case_00000_x.npy …")
    expected = {f"{name}_{kind}.npy": "" for name in names for kind in "xy"}
    _compare_names(folder, {path.name for path in volumes}, expected, "KiTS19" if synthetic is None else MARKER)
    digest = hashlib.sha256("".join(f"{path.name}\t{path.stat().st_size}\n" for path in volumes).encode())
    wanted = {"fingerprint": digest.hexdigest()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, published_cases(), synthetic, adopted=folder) as job:
        if job.found is not None:
            return job.found
        with ThreadPoolExecutor(workers) as pool:
            made = pool.map(lambda name: _adopted(folder, name), names)
            records = dict(zip(names, tqdm(made, "adopt", len(names), unit="case", disable=None), strict=True))
        if (folder / CHECKSUMS).exists():
            md5s = {name: entry.md5 for record in records.values() for name, entry in record.files.items()}
            _compare_published(folder, md5s, folder / CHECKSUMS)
        linked = [(path, data_dir / path.name) for path in volumes]
        link_or_copy_all(linked, data_dir, "delete it or name another --data-dir")
        return job.finish(*_describe(data_dir, records), "KiTS19, prepared by the reference's script")


def verify(
    data_dir: Path,
    checksums: Annotated[
        Path | None, Option("also compare with this checksum.json, for example that of the reference")
    ] = None,
    workers: int = 1,
) -> Manifest:
    """Compare the names of the volumes and all checksums of ``data_dir``; this reads all data.

    Args:
        workers: files at a time.

    Raises:
        DataError: a file is missing, unexpected, changed or damaged, or the MD5s of ``checksums`` are others.
    """
    found = manifest.verify(data_dir, FORMAT, PREPARE_COMMAND, workers)
    md5s = _read_checksums(data_dir / CHECKSUMS)
    _compare_names(data_dir, {path.name for path in listed(data_dir, "*.npy")}, md5s, data_dir / CHECKSUMS)
    if checksums is not None:
        _compare_published(data_dir, md5s, checksums)
    return found


def _prepare_cases(source: RawScans, data_dir: Path, workers: int) -> dict[str, CaseRecord]:
    """Prepare the cases without a record, the largest first; return all records by case name."""
    patch = source.settings.patch
    voxels = {case: voxels_of(case.image, patch) for case in source.cases}
    processes = min(workers, 1 + sum(scan for scan, _ in voxels.values()) // VOXELS_PER_WORKER)
    with Stages(data_dir / RECORDS, processes, partial(torch.set_num_threads, 1)) as stages:
        for case in voxels:
            _forget_lost(stages, data_dir, case.name)
        left = [made for case, (_, made) in voxels.items() if stages.record(STAGE, case.name) is None]
        preparation.require_space(data_dir, 5 * sum(left))  # float32 and uint8 per voxel
        cases = sorted(voxels, key=lambda case: voxels[case], reverse=True)
        records = stages.run(STAGE, {case.name: (case, data_dir, patch) for case in cases}, prepare_case)
        return {name: _parse(record, stages.path(STAGE, name)) for name, record in records.items()}


def prepare_case(case: RawCase, data_dir: Path, patch: tuple[int, int, int]) -> dict[str, Any]:
    """Write the two files of ``case``; return its :class:`CaseRecord` as plain values."""
    scan = load_scan(case.image, case.label)
    image, label = preprocess(scan, patch)
    _, depth, height, width = image.shape
    made = VolumeEntry(case.name, (depth, height, width), case.split)
    files = {made.image_file: _save(data_dir / made.image_file, image)}
    files[made.label_file] = _save(data_dir / made.label_file, label)
    return dataclasses.asdict(CaseRecord(made.shape, scan.spacing, files))


def _save(path: Path, array: NDArray[Any]) -> FileEntry:
    atomic.save(path, array)
    return file_entry(path, md5=True)


def _forget_lost(stages: Stages, data_dir: Path, name: str) -> None:
    """Delete the record of a case whose files are missing or have other sizes, so that they are made again."""
    record, path = stages.record(STAGE, name), stages.path(STAGE, name)
    if record is None:
        return
    files = _parse(record, path).files
    existing = [data_dir / file for file in files if (data_dir / file).is_file()]
    if {file.name: file.stat().st_size for file in existing} != {file: entry.bytes for file, entry in files.items()}:
        path.unlink()


def _parse(record: dict[str, Any], path: Path) -> CaseRecord:
    try:
        files = {file: FileEntry(**digests) for file, digests in record["files"].items()}
        return CaseRecord(tuple(record["shape"]), tuple(record["spacing"]), files)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and run the command again") from error


def _adopted(data_dir: Path, name: str) -> CaseRecord:
    made = []
    for kind, dtype in (("x", np.float32), ("y", np.uint8)):
        path = data_dir / f"{name}_{kind}.npy"
        try:
            array = npy.mapped(path)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read ({error}); prepare it again") from error
        if array.dtype != dtype or array.ndim != 4 or len(array) != 1 or not array.flags.c_contiguous:
            raise DataError(f"{path}: {array.dtype} of shape {array.shape}, expected {dtype.__name__} of 1xDxHxW")
        made.append(array)
    image, label = made
    if image.shape != label.shape or label.max() >= CLASSES:
        raise DataError(f"{data_dir}: labels of {name}: {label.shape} up to {label.max()} for an image {image.shape}")
    if not np.isfinite(image).all():
        raise DataError(f"{data_dir / f'{name}_x.npy'} has values that are not finite; prepare it again")
    files = {f"{name}_{kind}.npy": file_entry(data_dir / f"{name}_{kind}.npy", md5=True) for kind in "xy"}
    return CaseRecord(tuple(image.shape[1:]), None, files)


def _describe(data_dir: Path, records: dict[str, CaseRecord]) -> tuple[dict[str, FileEntry], dict[str, int]]:
    """Write ``cases.json`` and ``checksum.json``; return the files and counts of the manifest."""
    splits = {name: raw.split_of(int(name[-5:])) for name in sorted(records)}
    cases = {
        name: {"shape": records[name].shape, "split": split, "spacing_of_scan_mm": records[name].spacing}
        for name, split in splits.items()
    }
    digests = {name: entry for case in splits for name, entry in records[case].files.items()}
    md5s = {name: entry.md5 for name, entry in digests.items()}
    for name, content in ((CASES, cases), (CHECKSUMS, md5s)):
        atomic.write_text(data_dir / name, json.dumps(content, indent=1) + "\n")
    files = {name: FileEntry(entry.bytes, entry.sha256) for name, entry in digests.items()}
    files.update(manifest.describe_files(data_dir, (CASES, CHECKSUMS)))
    uses = list(splits.values())
    return files, {"train_samples": uses.count("train"), "eval_samples": uses.count("eval")}


def _read_checksums(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(md5) for name, md5 in read_json_object(path).items()}
    except DataError as error:
        raise DataError(f"{path} cannot be read as names and MD5s of files ({error})") from error


def _compare_names(data_dir: Path, found: set[str], expected: dict[str, str], source: Path | str) -> None:
    if missing := sorted(set(expected) - found):
        raise DataError(f"{data_dir} lacks {_some(missing)}: {len(found)} volumes, but {source} has {len(expected)}")
    if unexpected := sorted(found - set(expected)):
        raise DataError(f"{data_dir} has {_some(unexpected)}, which {source} does not have")


def _compare_published(data_dir: Path, md5s: dict[str, str], published: Path) -> None:
    expected = _read_checksums(published)
    _compare_names(data_dir, set(md5s), expected, published)
    if different := [name for name in sorted(md5s) if md5s[name] != expected[name]]:
        images = sum(name.endswith("_x.npy") for name in different)
        raise DataError(
            f"{data_dir}: {images} images and {len(different) - images} labels have other MD5s than {published}: "
            f"{_some(different)}. Images alone: rounding, which other processors and versions of PyTorch do "
            "differently. Labels: other scans"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _remarks(made: Manifest, checksums: Path | None = None, **options: Any) -> Iterator[str]:
    if checksums is not None:
        yield f"All volumes are those of {checksums}"


COMMANDS = DataCommands(
    "unet3d",
    raw="scans and their labels",
    prepared="prepared volumes",
    real="KiTS19",
    generate=generate,
    prepare=prepare,
    verify=verify,
    remarks=_remarks,
    adopt=adopt,
    published=published_cases(),
    memory_per_worker=MEMORY_PER_WORKER,
)
