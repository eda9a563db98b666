"""Tar files whose members are read in place, and the members of new ones."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from common.formats.raw_files import is_data
from common.untrusted.archives import tar_members


def members(file: IO[bytes], source: Path, start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Name without folders, absolute offset and size of every file in the tar that begins at ``start`` of ``file``.

    Files that belong to no data set (:func:`common.formats.raw_files.is_data`) are left out.

    Raises:
        DataError: the tar is truncated or damaged; ``source`` is named.
    """
    file.seek(start)
    for _, member in tar_members(file, f"{source}: the tar at byte {start} is truncated or damaged", "r:"):
        if member.isfile() and is_data(member.name):
            yield Path(member.name).name, member.offset_data, member.size


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Write one file."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
