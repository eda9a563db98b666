"""``manifest.json``: what a prepared data set consists of, so that a run can trust it without reading it all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.data import atomic
from common.errors import DataError
from common.untrusted.regular_file import read_bytes
from common.untrusted.strict_json import FILE_ENTRIES, parse

NAME = "manifest.json"
DECODED = "decoded"
"""Key of a manifest's ``source`` that says whether preparation decoded every picture, where it has this choice."""
COMPLETELY, TRUSTED = "completely", "no, --trust was given"
"""Values of :data:`DECODED`."""
_CHUNK = 1 << 24


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Digests:
    """Size in bytes, SHA-256 and MD5 (hexadecimal) of one file."""

    bytes: int
    sha256: str
    md5: str

    @property
    def entry(self) -> FileEntry:
        """What a manifest has of it."""
        return FileEntry(self.bytes, self.sha256)


@dataclass(frozen=True)
class Manifest:
    """A prepared data set.

    Attributes:
        format: name and version of the prepared format, e.g. ``imagenet-recordio/1``.
        files: path below the root to its size and checksum.
        counts: what is counted, e.g. ``train_samples``, ``eval_samples``, ``classes``.
        stand_in: True for generated or reduced data; False claims the benchmark's real data.
        source: what it was prepared from: kind, fingerprint, date; free text for people and for resuming.
    """

    format: str
    files: dict[str, FileEntry]
    counts: dict[str, int]
    stand_in: bool
    source: dict[str, str]

    @property
    def trusted(self) -> bool:
        """Whether ``prepare --trust`` left the samples undecoded."""
        return self.source.get(DECODED) == TRUSTED


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of ``path``; reads all of it."""
    return FileEntry(path.stat().st_size, digest(path, "sha256"))


def digest(path: Path, algorithm: str) -> str:
    """Checksum of ``path``, hexadecimal, by an algorithm that hashlib names; reads all of it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def digests(path: Path, progress: Callable[[int], object] = lambda read: None) -> Digests:
    """Size and both checksums of ``path``, which is read once.

    Args:
        path: a file.
        progress: called with the bytes of each piece that was read.
    """
    sha256, md5, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    with open(path, "rb") as file, ThreadPoolExecutor(1) as beside:
        while chunk := file.read(_CHUNK):
            other = beside.submit(md5.update, chunk)  # hashing does not hold the interpreter's lock
            sha256.update(chunk)
            other.result()
            size += len(chunk)
            progress(len(chunk))
    return Digests(size, sha256.hexdigest(), md5.hexdigest())


def describe_files(root: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """The ``files`` of a manifest: every name below ``root`` with size and checksum."""
    return {name: file_entry(root / name) for name in names}


def write(root: Path, manifest: Manifest) -> None:
    """Write ``manifest`` to ``root``; the last act of a preparation."""
    atomic.write_text(root / NAME, json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n")


def read(root: Path, expected_format: str, command: str, counts: Iterable[str] = ()) -> Manifest:
    """The manifest of ``root``; checks the format's name and that every file is there with its size.

    Args:
        root: folder of the prepared data.
        expected_format: what the reader understands.
        command: the command that makes the data, for messages.
        counts: what has to be counted, and not 0.

    Raises:
        DataError: the folder, the manifest, a count or a file is missing or not as the manifest says.
    """
    path, remedy = root / NAME, f"run '{command}'"
    manifest = read_alone(root, expected_format, remedy)
    for name, entry in manifest.files.items():
        file = root / name
        if not file.is_file():
            raise DataError(f"{file} is missing though {NAME} names it; {remedy}")
        if (size := file.stat().st_size) != entry.bytes:
            raise DataError(f"{file} has {size} bytes where {NAME} says {entry.bytes}; {remedy}")
    for count in counts:
        if manifest.counts.get(count, 0) < 1:
            raise DataError(f"{path} has no {count}; {remedy}")
    return manifest


def read_alone(root: Path, expected_format: str, remedy: str) -> Manifest:
    """Return the manifest of ``root`` after a check of its format's name; the files that it names are not looked at.

    Args:
        root: folder of the prepared data.
        expected_format: what the reader understands.
        remedy: what to do about it, for messages.

    Raises:
        DataError: the folder or the manifest is missing, or the manifest is damaged or of another format.
    """
    path = root / NAME
    if not os.path.isdir(root):  # False, too, where one may not look
        raise DataError(f"data folder {root} does not exist; {remedy}")
    if not os.path.lexists(path):
        raise DataError(f"{path} is missing: {root} holds no completely prepared data; {remedy}")
    try:
        raw = parse(read_bytes(path).decode("utf-8"), FILE_ENTRIES)
    except DataError as error:
        raise DataError(f"{path} cannot be read ({error}); {remedy}") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise DataError(f"{path} lacks or garbles a field (format); {remedy}")
    if raw["format"] != expected_format:
        raise DataError(f"{path}: format {raw['format']!r} where {expected_format!r} is needed; {remedy}")
    return _parse(raw, path, remedy)


def verify(root: Path, expected_format: str, command: str) -> Manifest:
    """As :func:`read`, and every checksum; reads all data.

    Raises:
        DataError: as :func:`read`, or a checksum differs.
    """
    manifest = read(root, expected_format, command)
    for name, entry in manifest.files.items():
        if (found := digest(root / name, "sha256")) != entry.sha256:
            raise DataError(
                f"{root / name}: SHA-256 {found} where {NAME} says {entry.sha256}: the file was changed or damaged; "
                f"delete it and {NAME}, then run '{command}'"
            )
    return manifest


def _parse(raw: Any, path: Path, remedy: str) -> Manifest:
    try:
        if not isinstance(raw["stand_in"], bool):
            raise TypeError("stand_in is neither true nor false")
        files: Mapping[str, Mapping[str, Any]] = raw["files"]
        return Manifest(
            format=str(raw["format"]),
            files={name: FileEntry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()},
            counts={name: int(count) for name, count in raw["counts"].items()},
            stand_in=raw["stand_in"],
            source={name: str(text) for name, text in raw["source"].items()},
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{path} lacks or garbles a field ({type(error).__name__}: {error}); {remedy}") from error
