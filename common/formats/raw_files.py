"""Listings of data folders and tars, without the files that operating systems and notebooks leave there."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO

from common.untrusted.archives import tar_members

LEFT_BEHIND = frozenset({"__macosx", "$recycle.bin", "@eadir", "desktop.ini", "ehthumbs.db", "lost+found", "thumbs.db"})
"""Ignored names in lower case, in addition to all that begin with a dot (``.DS_Store``, ``._a.jpg``)."""
_MAGIC = frozenset("*?[")


def is_data(name: str) -> bool:
    """Return whether the file with this path below its folder, or in its archive, may be part of a data set."""
    parts = PurePosixPath(name).parts
    return not any(part.lower() in LEFT_BEHIND or (part.startswith(".") and part != "..") for part in parts)


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Return files and folders below ``folder`` that match a glob, sorted, and may be part of a data set.

    In contrast to :meth:`pathlib.Path.glob`, ``**`` follows links to folders, because data sets are spread over disks,
    and a folder that cannot be read is an error, because its files would be missing unnoticed.

    Args:
        folder: a missing folder has no files.
        pattern: parts without wildcards may also be names that are otherwise ignored, such as ``.zarray``.

    Raises:
        OSError: a folder cannot be read.
    """
    return sorted(_matches(folder, pattern.split("/"), ()))


def _matches(folder: Path, parts: Sequence[str], above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Yield what matches the ``parts`` of a glob; ``above`` has device and inode of the folders that ``**`` entered."""
    part, *rest = parts
    if part == "**":
        if not folder.is_dir():
            return
        status = folder.stat()
        if (identity := (status.st_dev, status.st_ino)) in above:  # a link to a folder above it
            return
        yield from _matches(folder, rest, ())
        for below in _entries(folder, "*", folders=True):
            yield from _matches(below, parts, (*above, identity))
    elif rest:
        for below in _entries(folder, part, folders=True):
            yield from _matches(below, rest, ())
    else:
        yield from _entries(folder, part)


def _entries(folder: Path, pattern: str, folders: bool = False) -> Iterator[Path]:
    """Yield the data in ``folder`` whose names match, or only the folders among them."""
    if not _MAGIC.intersection(pattern):  # the folder may have a million other entries
        path = folder / pattern
        if path.is_dir() if folders else path.exists():
            yield path
        return
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if fnmatchcase(entry.name, pattern) and is_data(entry.name) and (not folders or entry.is_dir()):
                    yield folder / entry.name
    except (FileNotFoundError, NotADirectoryError):
        return


def data_members(file: IO[bytes], source: Path, start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield name without folders, absolute offset and size of every file in the tar at offset ``start`` of ``file``.

    Skips files that do not belong to a data set (:func:`is_data`).

    Raises:
        DataError: the tar is truncated or damaged; the message names ``source``.
    """
    file.seek(start)
    for _, member in tar_members(file, f"{source}: the tar at byte {start} is truncated or damaged", "r:"):
        if member.isfile() and is_data(member.name):
            yield Path(member.name).name, member.offset_data, member.size


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add one file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
