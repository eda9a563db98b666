"""``manifest.json``: the list of files of a prepared data set, so that a run can check it without reading all data."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from common.data import atomic
from common.errors import DataError
from common.untrusted.regular_file import read_bytes
from common.untrusted.strict_json import FILE_ENTRIES, parse

NAME = "manifest.json"
DECODED = "decoded"
"""Key in ``source`` of a manifest: whether preparation decoded every picture. Only for workloads with this choice."""
COMPLETELY, TRUSTED = "completely", "no, --trust was given"
"""Values of :data:`DECODED`."""
UNDECIDED = "its manifest is of an older version, which does not say whether the data are the benchmark's"
"""``custom`` of such a manifest, if :func:`read` is allowed to accept it."""
_CHUNK = 1 << 24  # bytes per read
Listed = TypeVar("Listed", bound=Sized)


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and checksums (hexadecimal) of one file.

    Attributes:
        md5: set only if the MD5 of the file is published; otherwise empty.
    """

    bytes: int
    sha256: str
    md5: str = ""


class ManifestCounts(dict[str, int]):
    """Counts of a manifest by name. Reading a missing one raises DataError, because the file is old or was changed.

    Attributes:
        remedy: advice to the user.
    """

    origin: Path = Path(NAME)
    remedy: str = "prepare the data again"

    def __missing__(self, name: str) -> int:
        raise DataError(f"{self.origin} has no {name}; {self.remedy}")


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared data set.

    Attributes:
        format: name and version of the prepared format, e.g. ``imagenet-recordio/1``.
        files: path below the root to size and checksums.
        counts: numbers of e.g. ``train_samples``, ``eval_samples``, ``classes``.
        synthetic: whether the data are synthetic.
        source: origin of the data: kind, fingerprint, date; free text for users and for resuming.
        custom: the first difference from the benchmark's published data, in words; empty for the benchmark's data and
            for synthetic data. :mod:`common.data.published` decides.
    """

    format: str
    files: dict[str, FileEntry]
    counts: dict[str, int]
    synthetic: bool
    source: dict[str, str]
    custom: str = ""

    @property
    def trusted(self) -> bool:
        """Whether ``prepare --trust`` left the samples undecoded."""
        return self.source.get(DECODED) == TRUSTED


def file_entry(path: Path, md5: bool = False, progress: Callable[[int], object] = lambda read: None) -> FileEntry:
    """Return size and SHA-256 of ``path``, and optionally its MD5; reads the whole file once.

    Args:
        md5: whether to compute the MD5, in a second thread.
        progress: receives the size of each chunk that was read, in bytes.
    """
    sha256, other, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    with open(path, "rb") as file, ThreadPoolExecutor(1) as beside:
        while chunk := file.read(_CHUNK):
            added = beside.submit(other.update, chunk) if md5 else None  # hashing releases the GIL
            sha256.update(chunk)
            if added is not None:
                added.result()
            size += len(chunk)
            progress(len(chunk))
    return FileEntry(size, sha256.hexdigest(), other.hexdigest() if md5 else "")


def digest(path: Path, algorithm: str) -> str:
    """Return the hexadecimal checksum of ``path``, with a hashlib algorithm; reads the whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def describe_files(root: Path, names: Iterable[str], with_md5: Container[str] = ()) -> dict[str, FileEntry]:
    """Return the ``files`` of a manifest: size and SHA-256 of ``names`` below ``root``, and MD5s of ``with_md5``."""
    return {name: file_entry(root / name, name in with_md5) for name in names}


def write(root: Path, manifest: Manifest) -> None:
    """Write ``manifest`` to ``root``; must be the last step of a preparation."""
    content = asdict(manifest)
    for entry in content["files"].values():
        if not entry["md5"]:
            del entry["md5"]
    atomic.write_text(root / NAME, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read(
    root: Path, expected_format: str, command: str, counts: Iterable[str] = (), undecided: bool = False
) -> Manifest:
    """Return the manifest of ``root``; checks its format, and that every file exists with the right size.

    Args:
        command: the command that makes the data, for messages.
        counts: names of counts that must be at least 1.
        undecided: accept a manifest of an older version without ``custom``, and set it to :data:`UNDECIDED`.

    Raises:
        DataError: the folder, the manifest, a count or a file is missing, or differs from the manifest.
    """
    path, remedy = root / NAME, f"run '{command}'"
    manifest = read_alone(root, expected_format, remedy, undecided)
    for name, entry in manifest.files.items():
        file = root / name
        if not file.is_file():
            raise DataError(f"{file} is missing though {NAME} names it; delete {NAME}, then {remedy}")
        if (size := file.stat().st_size) != entry.bytes:
            raise DataError(
                f"{file} has {size} bytes where {NAME} says {entry.bytes}; delete it and {NAME}, then {remedy}"
            )
    for count in counts:
        if manifest.counts.get(count, 0) < 1:
            raise DataError(f"{path} has no {count}; {remedy}")
    return manifest


def read_alone(root: Path, expected_format: str, remedy: str, undecided: bool = False) -> Manifest:
    """Return the manifest of ``root`` after a check of its format; does not look at the files that it lists.

    Args:
        remedy: advice to the user, for messages.
        undecided: accept a manifest of an older version without ``custom``, and set it to :data:`UNDECIDED`.

    Raises:
        DataError: the folder or the manifest is missing, or the manifest is damaged, of another format or of an older
            version.
    """
    path = root / NAME
    if not os.path.isdir(root):  # also False without permission
        reason = "is no folder" if os.path.lexists(root) else "does not exist"
        raise DataError(f"data folder {root} {reason}; {remedy}")
    if not os.path.lexists(path):
        raise DataError(f"{path} is missing: {root} holds no completely prepared data; {remedy}")
    try:
        raw = parse(read_bytes(path).decode("utf-8"), FILE_ENTRIES)
    except DataError as error:
        raise DataError(f"{error}; make it a readable file, or delete it and {remedy}") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); delete it, then {remedy}") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise DataError(f"{path} has a missing or invalid field (format); delete it, then {remedy}")
    if raw["format"] != expected_format:
        raise DataError(
            f"{path}: format {raw['format']!r} where {expected_format!r} is needed; name another folder, or delete "
            f"this one and {remedy}"
        )
    if "stand_in" in raw:
        edit = shlex.join(["sed", "-i", 's/"stand_in":/"synthetic":/', str(path)])
        raise DataError(f"{path} was written by an earlier version: rename its field stand_in to synthetic: {edit}")
    if "custom" not in raw:
        if not undecided:
            raise DataError(
                f"{path} was written by an older version and does not say whether the data are the benchmark's: run "
                f"'mlperf-suite prepare' again with the same options and folders, which adds that and keeps the files"
            )
        raw["custom"] = UNDECIDED
    return _parse(raw, path, remedy)


def read_listed(path: Path, read: Callable[[Path], Listed], counted: int, prepare_command: str) -> Listed:
    """Return ``read(path)``, a list of samples, after a check that it has as many as the manifest counts.

    Args:
        counted: number of samples in the manifest.

    Raises:
        DataError: the numbers differ.
    """
    listed = read(path)
    if len(listed) != counted:
        raise DataError(f"{path} has {len(listed)} samples where {NAME} says {counted}; run '{prepare_command}'")
    return listed


def verify(root: Path, expected_format: str, command: str, workers: int = 1) -> Manifest:
    """Return the manifest as :func:`read` does, and compare every checksum; reads all data once.

    Args:
        workers: files that are read at a time.

    Raises:
        DataError: as :func:`read`, or a checksum differs; the message names the first such file.
    """
    manifest = read(root, expected_format, command)
    with ThreadPoolExecutor(workers) as pool:
        compared = pool.map(lambda name: verify_file(root, manifest, name, command), manifest.files)
        try:
            for _ in tqdm(compared, "verify", len(manifest.files), unit="file", disable=None):
                pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return manifest


def verification(expected_format: str, command: str) -> Callable[..., Manifest]:
    """Return the function of ``mlperf-suite verify`` for data whose manifest has a checksum of every file."""

    def compare(data_dir: Path, workers: int = 1) -> Manifest:
        return verify(data_dir, expected_format, command, workers)

    return compare


def verify_file(root: Path, manifest: Manifest, name: str, command: str, md5: bool = False) -> FileEntry:
    """Compare the file ``name`` below ``root`` with its checksums in ``manifest``; reads it once.

    Args:
        command: the command that makes the data, for messages.
        md5: compute the MD5 even if the manifest has none.

    Returns:
        entry with the computed checksums.

    Raises:
        DataError: a checksum differs.
    """
    expected = manifest.files[name]
    found = file_entry(root / name, md5=md5 or bool(expected.md5))
    checksums = [("SHA-256", expected.sha256, found.sha256)]
    checksums += [("MD5", expected.md5, found.md5)] if expected.md5 else []
    for algorithm, known, actual in checksums:
        if known != actual:
            raise DataError(
                f"{root / name}: {algorithm} {actual} where {NAME} says {known}: the file was changed or damaged; "
                f"delete it and {NAME}, then run '{command}'"
            )
    return found


def _parse(raw: Any, path: Path, remedy: str) -> Manifest:
    try:
        if not isinstance(raw["synthetic"], bool):
            raise TypeError("synthetic is neither true nor false")
        if not isinstance(raw["custom"], str):
            raise TypeError("custom is no text")
        files: Mapping[str, Mapping[str, Any]] = raw["files"]
        counts = ManifestCounts((name, int(count)) for name, count in raw["counts"].items())
        counts.origin, counts.remedy = path, remedy
        return Manifest(
            format=str(raw["format"]),
            files={
                name: FileEntry(int(entry["bytes"]), str(entry["sha256"]), str(entry.get("md5", "")))
                for name, entry in files.items()
            },
            counts=counts,
            synthetic=raw["synthetic"],
            source={name: str(text) for name, text in raw["source"].items()},
            custom=raw["custom"],
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(
            f"{path} has a missing or invalid field ({type(error).__name__}: {error}); delete it, then {remedy}"
        ) from error
