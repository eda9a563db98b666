"""Listings of data folders and tars, without the files that operating systems and notebooks leave there."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from common.untrusted.archives import tar_members

LEFT_BEHIND = frozenset({"__macosx", "$recycle.bin", "@eadir", "desktop.ini", "ehthumbs.db", "lost+found", "thumbs.db"})
"""Ignored names in lower case, in addition to all that begin with a dot (``.DS_Store``, ``._a.jpg``)."""


def is_data(name: str) -> bool:
    """Return whether the file with this path below its folder, or in its archive, may be part of a data set."""
    parts = PurePosixPath(name).parts
    return not any(part.lower() in LEFT_BEHIND or (part.startswith(".") and part != "..") for part in parts)


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Return files and folders below ``folder`` that match a glob, sorted, and may be part of a data set."""
    return sorted(path for path in folder.glob(pattern) if is_data(path.relative_to(folder).as_posix()))


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
