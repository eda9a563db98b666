"""Tar files whose members are read in place, and the members of new ones."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import DataError


def members(file: io.BufferedIOBase | io.RawIOBase, source: Path, start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Name without folders, absolute offset and size of every file in the tar that begins at ``start`` of ``file``.

    Raises:
        DataError: the tar is truncated or damaged; ``source`` is named.
    """
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile():
                    yield Path(member.name).name, member.offset_data, member.size
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # tarfile ends at any damage
                raise tarfile.ReadError(f"no end mark at byte {tar.offset}")
    except tarfile.TarError as error:
        raise DataError(f"{source}: the tar at byte {start} is truncated or damaged: {error}") from error


def extract(tar: tarfile.TarFile, name: str) -> bytes:
    """The content of one file.

    Raises:
        KeyError: there is none of that name.
    """
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file.read()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Write one file."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
