"""Untrusted tar, gzip and zip archives, read within bounds.

A gzip stream of one megabyte can inflate to a gigabyte. The header of a tar can announce a name of eight gigabytes,
which ``tarfile`` reads into memory. Members can occur twice, have a path below a file, or have names that no file
system accepts.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from common.errors import DataError
from common.untrusted.regular_file import open_regular

HEADER_BYTES = 2**16
"""Largest additional header of a tar member (its name and attributes), in bytes. Paths have at most 4,096 bytes."""
NAME_BYTES, PATH_BYTES = 255, 2048
"""Largest part of a member's name, which is the limit of Linux, and largest whole name, in bytes."""
DIRECTORY_BYTES = 20 * 2**20
"""Largest directory of a zip in bytes. Each 46 bytes of it become an object of 550 bytes.

The directory of COCO's 118,288 training pictures has 13 MB, that of a checkpoint of 10,000 tensors 1 MB.
"""
_COPIED_AT_ONCE = 2**20
_GZIP_BYTES = 2**18  # compressed bytes that are inflated at once, to at most 271 MB

DAMAGED = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, zipfile.BadZipFile, struct.error)
"""Exceptions from reading a damaged archive, in addition to OSError of the disk."""
BAD_ZIP = (*DAMAGED, ValueError, OverflowError, NotImplementedError, RuntimeError)
"""Exceptions from reading a damaged zip, or one with names or encryption that ``zipfile`` does not support."""


class _BoundedMember(tarfile.TarInfo):
    """A member whose additional headers are limited, because ``tarfile`` reads them completely."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _BoundedMember:
        """Parse a header block."""
        member = super().frombuf(buf, encoding, errors)
        additional = (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise _Excessive("a member is a sparse file, which no archive that is read here needs")
        if member.type in additional and not 0 <= member.size <= HEADER_BYTES:
            raise _Excessive(f"a header of a member has {member.size:,} bytes, and {HEADER_BYTES:,} are enough")
        return member


class _Excessive(Exception):
    """An archive exceeds a bound. ``tarfile`` would take its own errors after the first member as the end."""


def tar_members(
    file: IO[bytes], damage: str, mode: str = "r|", *, most: int | None = None
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the open archive and each of its members in turn; members that were read are not kept.

    Args:
        file: open at the beginning of the archive.
        damage: start of the message about a damaged archive, such as "a.tar is damaged".
        mode: mode of ``tarfile.open``: ``r|`` and ``r|gz`` for streams, ``r:`` for files with random access.
        most: largest inflated size in bytes; None for an archive that is not compressed.

    Raises:
        DataError: the archive is damaged or exceeds a bound.
    """
    with named_damage(damage), tarfile.open(fileobj=file, mode=mode, tarinfo=_BoundedMember) as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            tar.members.clear()
            if most is not None and tar.offset > most:
                raise _Excessive(f"it inflates to more than {most:,} bytes")
            yield tar, member
        if mode == "r:":
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # tarfile treats any damage as the end
                raise tarfile.ReadError(f"no end mark at byte {tar.offset}")


@contextlib.contextmanager
def named_damage(damage: str) -> Iterator[None]:
    """Convert errors of a damaged archive within the block to a DataError whose message begins with ``damage``."""
    try:
        yield
    except (_Excessive, *DAMAGED) as error:
        raise DataError(f"{damage}: {error}; delete it and fetch it again") from error
    except OSError as error:
        if error.errno is not None:  # an error of the disk, not of gzip
            raise
        raise DataError(f"{damage}: {error}; delete it and fetch it again") from error


def unpack(
    archive: Path,
    folder: Path,
    path_of: Callable[[tarfile.TarInfo], str | None],
    *,
    most: int,
    mode: str = "r|gz",
) -> int:
    """Write files of a tar below a folder and return their number.

    Args:
        path_of: maps a member to its path below the folder, with ``/`` between its parts; None skips the member.
        mode: mode of ``tarfile.open``, ``r|`` or ``r|gz``.

    Raises:
        DataError: the archive is damaged, or a selected member is not a file, occurs twice, has a path below a file
            or outside of the folder, or has a name that the file system does not accept.
        OSError: an error of the disk.
    """
    written: set[str] = set()
    folders: set[str] = set()
    with open_regular(archive) as file, named_damage(f"{archive} is damaged"):
        for tar, member in tar_members(file, f"{archive} is damaged", mode, most=most):
            if (name := path_of(member)) is None:
                continue
            parts = PurePosixPath(name).parts
            above = {"/".join(parts[:count]) for count in range(1, len(parts))}
            name = "/".join(parts)
            if not member.isfile() or not parts or not _fits(parts):
                raise DataError(f"{archive}: {member.name[:200]!r} is no file with a usable name; fetch it again")
            if name in written or name in folders or above & written:
                raise DataError(f"{archive}: {name!r} comes twice, or lies below a file; fetch it again")
            written.add(name)
            folders |= above
            content = tar.extractfile(member)
            assert content is not None  # because the member is a file
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, open(path, "xb") as out:
                shutil.copyfileobj(content, out, _COPIED_AT_ONCE)
    return len(written)


def _fits(parts: tuple[str, ...]) -> bool:
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    plain = not any(part in ("..", "/") or "\0" in part for part in parts)
    return plain and max(sizes) <= NAME_BYTES and sum(sizes) + len(sizes) <= PATH_BYTES


def read_gzip(path: Path, most: int) -> bytes:
    """Return the inflated content of a gzip file.

    Raises:
        DataError: it is damaged, inflates to more than ``most`` bytes, or cannot be read.
    """
    with open_regular(path) as packed, named_damage(f"{path} is damaged"), gzip.open(packed) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path} inflates to more than {most:,} bytes; fetch it again")
    return content


def gunzip(content: memoryview) -> Iterator[bytes]:
    """Yield the inflated content of a gzip file, after which its checksum was compared. Releases the GIL.

    Raises:
        DataError: the file is truncated or damaged.
    """
    inflating = zlib.decompressobj(wbits=31)  # 31: with gzip's header and checksum
    try:
        for start in range(0, len(content), _GZIP_BYTES):
            given: memoryview | bytes = content[start : start + _GZIP_BYTES]
            while given:
                if inflating.eof:  # zeros or another member follow
                    given = bytes(given).lstrip(b"\0")
                    if not given:
                        break
                    inflating = zlib.decompressobj(wbits=31)
                yield inflating.decompress(given)
                given = inflating.unused_data
    except zlib.error as error:
        raise DataError(f"the gzip data are damaged ({error})") from error
    if not inflating.eof:
        raise DataError("the gzip data end early")


def open_zip(path: Path, file: BinaryIO) -> zipfile.ZipFile:
    """Open a zip after a check of its directory's size; its members are not read.

    Args:
        file: open for reading bytes; it must stay open as long as the archive.

    Raises:
        DataError: it is not a zip, is damaged, or has too many members.
    """
    try:
        return bounded_zip(file)
    except (OSError, *BAD_ZIP) as error:
        raise DataError(f"{path} is damaged or no archive: {error}; delete it and fetch it again") from error


def bounded_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open a zip as :func:`open_zip` does, but raise the exceptions of ``zipfile``."""
    _check_directory(file)
    return zipfile.ZipFile(file)


def _check_directory(file: BinaryIO) -> None:
    """Refuse a directory of too many members before ``zipfile`` creates an object for each."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 2**16 - 200))
    tail = file.read()
    file.seek(0)
    found = tail.rfind(b"PK\5\6")
    if found < 0:
        raise zipfile.BadZipFile("it has no directory")
    # https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.16 and 4.3.14
    directory_bytes = int.from_bytes(tail[found + 12 : found + 16], "little")
    large = tail.rfind(b"PK\6\6", 0, found)
    if directory_bytes == 0xFFFFFFFF and large >= 0:
        directory_bytes = int.from_bytes(tail[large + 40 : large + 48], "little")
    if directory_bytes > DIRECTORY_BYTES:
        raise zipfile.BadZipFile(
            f"its directory has {directory_bytes:,} bytes, and at most {DIRECTORY_BYTES:,} are read"
        )
