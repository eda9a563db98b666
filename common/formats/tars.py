"""Tar files: read members in place, and add members to new files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from common.formats.raw_files import is_data
from common.untrusted.archives import tar_members


def members(file: IO[bytes], source: Path, start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield name without folders, absolute offset and size of every file in the tar at offset ``start`` of ``file``.

    Skips files that do not belong to a data set (:func:`common.formats.raw_files.is_data`).

    Raises:
        DataError: the tar is truncated or damaged; the message names ``source``.
    """
    file.seek(start)
    for _, member in tar_members(file, f"{source}: the tar at byte {start} is truncated or damaged", "r:"):
        if member.isfile() and is_data(member.name):
            yield Path(member.name).name, member.offset_data, member.size


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add one file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
