"""Find raw files in any subfolder, because the official tools create different folders.

MLCommons' downloader, for example, creates ``processed_dataset/``, and the archive in it unpacks to ``results4/``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.data import manifest, preparation
from common.errors import DataError
from common.formats.raw_files import is_data, listed

LEVELS = 4
"""Levels of folders that are searched below the folder that the user names."""
_PART = re.compile(r"(?P<start>.*-)\d{5}-of-(?P<total>\d{5})(?P<end>(\.\w+)?)")
Identity = tuple[int, int]
"""Device number and inode of a file."""


def fingerprint_of(files: Iterable[tuple[str, str, int]], content: bytes = b"") -> str:
    """Return the SHA-256 over split, name and size of raw files, which does not depend on their folders.

    Args:
        content: content of a further file.
    """
    lines = "".join(f"{split}\t{name}\t{size}\n" for split, name, size in files)
    return hashlib.sha256(content + lines.encode()).hexdigest()


@dataclass(frozen=True)
class RawSplits:
    """All raw files by split, sorted by name.

    Attributes:
        synthetic: description of synthetic data; None for real data.
        content: content of a further file, such as statistics of all samples.
    """

    splits: Mapping[str, Sequence[Path]]
    synthetic: dict[str, Any] | None
    content: bytes = b""

    def fingerprint(self) -> str:
        """Return the result of :func:`fingerprint_of` for these files."""
        files = ((split, path.name, path.stat().st_size) for split, paths in self.splits.items() for path in paths)
        return fingerprint_of(files, self.content)


def find_file(root: Path, *patterns: str, others: Collection[str] = ()) -> Path | None:
    """Return the first file that matches one of the patterns in ``root``, or else in a folder below it.

    The folders below a folder that has a matching file are not searched, so files in ``root`` itself come first.
    Hidden folders, unfinished ones (``*.partial``) and prepared data are skipped. Only the names in a folder are
    read.

    Args:
        root: the folder that the user names.
        patterns: globs such as ``results4/part-*``, relative to the searched folder. All stand for the same data.
        others: names of folders to skip, because they contain other data under the same names.

    Returns:
        The first match by name; None if no folder has one.

    Raises:
        DataError: two folders have different files that match, or a folder cannot be read.
    """
    found: dict[Identity, Path] = {}  # a file and links to it count once
    searched: dict[Identity, Path] = {}
    level = [root] if root.is_dir() else []
    for depth in range(LEVELS + 1):
        below: list[Path] = []
        for folder in level:
            try:
                if searched.setdefault(_identity(folder), folder) is not folder:  # links may form a cycle
                    continue
                matches = [path for pattern in patterns if (path := _first(folder, pattern)) is not None]
                if depth < LEVELS and not any(path.parent == folder for path in matches):
                    below += _subfolders(folder, others)
            except OSError as error:
                raise DataError(f"{folder} cannot be searched for {patterns[0]}: {error.strerror}") from error
            for path in matches:
                found.setdefault(_identity(path), path)
        level = below
    paths = list(found.values())
    other = next((path for path in paths if path.parent != paths[0].parent), None)
    if other is not None:
        raise DataError(
            f"{paths[0]} and {other} are two copies of the same data below {root}; move one of them away, or name the "
            "folder that is meant instead"
        )
    return paths[0] if paths else None


def require_parts(paths: Sequence[Path]) -> None:
    """Check that files are the parts of one set, with names such as ``part-00000-of-00500``, and that none is missing.

    Args:
        paths: the files of one folder, at least one.

    Raises:
        DataError: a part is missing, or a file is no part of the set.
    """
    first = _PART.fullmatch(paths[0].name)
    if first is None:
        raise DataError(f"{paths[0]} has no name such as part-00000-of-00500; move it away")
    total = int(first["total"])
    expected = [f"{first['start']}{number:05d}-of-{total:05d}{first['end']}" for number in range(total)]
    there = {path.name for path in paths}
    if missing := [name for name in expected if name not in there]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{paths[0].parent} lacks {missing[0]}{more}; fetch the files again")
    if others := sorted(there.difference(expected)):
        raise DataError(f"{paths[0].with_name(others[0])} is none of the {total} parts of this set; move it away")


def packed_hint(root: Path, *archives: str) -> str:
    """Return the end of a message about missing files: the first of ``archives`` that is packed below ``root``."""
    found = next((path for name in archives if (path := find_file(root, name)) is not None), None)
    return "" if found is None else f"; {found} is still packed: unpack it there"


def _first(folder: Path, pattern: str) -> Path | None:
    return next((path for path in listed(folder, pattern) if path.is_file()), None)


def _subfolders(folder: Path, others: Collection[str]) -> list[Path]:
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name not in others and _is_searched(entry)]
    return sorted(path for path in paths if not _is_prepared(path))


def _is_searched(entry: os.DirEntry[str]) -> bool:
    return is_data(entry.name) and not entry.name.endswith(".partial") and entry.is_dir()


def _is_prepared(folder: Path) -> bool:
    """Return whether a preparation has written to ``folder``, since prepared files may have the names of raw ones."""
    return (folder / manifest.NAME).exists() or (folder / preparation.LOCK).exists()


def _identity(path: Path) -> Identity:
    status = path.stat()
    return status.st_dev, status.st_ino
