"""Opening and reading of untrusted files within bounds.

A path can name a pipe, on which reading blocks forever, or an endless device. A file, and even one line of it, can be
larger than the memory. Every function here that reads takes a bound and raises an error that names the file.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from common.errors import DataError

TEXT_BYTES = 64 * 2**20
"""Default limit in bytes for a file that is read completely.

The longest that a benchmark publishes, the merges of GPT-2's tokenizer and the lists of case names, have under 2 MB.
"""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, as bytes.

    Args:
        follow: whether the path may be a symbolic link.

    Raises:
        DataError: it is not a regular file, or cannot be read.
    """
    try:
        return open_file(path, follow)
    except NotRegular as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def open_file(path: Path, follow: bool = True) -> BinaryIO:
    """Open a regular file as :func:`open_regular` does, for callers that write the error message themselves.

    Args:
        follow: follow a symbolic link; otherwise a link is an error.

    Raises:
        OSError: it is not a regular file, or cannot be read.
        ValueError: there is a null byte in the name.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    if not stat.S_ISREG(mode := path.stat(follow_symlinks=follow).st_mode):
        raise NotRegular(errno.EINVAL, f"is {_KINDS.get(stat.S_IFMT(mode), 'a link')}, no regular file", str(path))
    descriptor = os.open(path, flags)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in between
        file.close()
        raise NotRegular(errno.EINVAL, "is no regular file", str(path))
    return file


class NotRegular(OSError):
    """The path names a folder, a pipe, a socket, a device, or a link that may not be followed."""


def read_bytes(path: Path, most: int = TEXT_BYTES, *, follow: bool = True, remedy: str = "") -> bytes:
    """Return the content of a regular file.

    Args:
        most: largest size in bytes.
        follow: whether the path may be a symbolic link.
        remedy: what the user can do, for the message, such as "fetch it again".

    Raises:
        DataError: the file is missing, too large, not a regular file, or cannot be read.
    """
    behind = f"; {remedy}" if remedy else ""
    try:
        with open_regular(path, follow) as file:
            content = file.read(most + 1)
    except DataError as error:
        raise DataError(f"{error}{behind}") from error
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
        raise DataError(f"{path}: cannot be read: {reason}{behind}") from error
    if len(content) > most:
        raise DataError(f"{path}: is larger than {_amount(most)}{behind}")
    return content


def size_of(path: Path, remedy: str) -> int:
    """Return the size of a file in bytes.

    Args:
        remedy: what the user can do, for the message.

    Raises:
        DataError: the file is missing, or its folder cannot be read.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {remedy}") from error


def read_text(path: Path, most: int = TEXT_BYTES, *, remedy: str = "") -> str:
    """Return the content of a regular UTF-8 file; for arguments and errors see :func:`read_bytes`."""
    return decoded(path, read_bytes(path, most, remedy=remedy), remedy)


def decoded(path: Path, content: bytes, remedy: str = "") -> str:
    """Return the ``content`` of a file as text.

    Raises:
        DataError: it is not UTF-8; the message has the number of the line, and ``remedy``.
    """
    try:
        return content.decode("utf-8-sig")  # without the mark that editors of Windows put first
    except UnicodeDecodeError as error:
        line = line_not_utf8(io.BytesIO(content))
        raise DataError(f"{path}: line {line} is not UTF-8: {error}" + (f"; {remedy}" if remedy else "")) from error


def line_not_utf8(file: IO[bytes]) -> int | None:
    """Return the number, from 1, of the first line of an open file that is not UTF-8; None if all are."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    while chunk := file.read(2**20):
        try:
            decoder.decode(chunk)
        except UnicodeDecodeError as error:
            return line + error.object.count(b"\n", 0, error.start)
        line += chunk.count(b"\n")
    return line if decoder.getstate()[0] else None


def lines(path: Path, file: IO[bytes] | io.BufferedIOBase, longest: int, before: int = 0) -> Iterator[bytes]:
    """Yield the lines of an open file, with their line ends.

    Args:
        file: open for reading bytes; it may be a decompressing one.
        longest: largest length of a line in bytes.
        before: number of lines that were read before.

    Raises:
        DataError: a line is longer; the message has its number.
    """
    number = before
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise DataError(f"{path}, line {number}: is longer than {_amount(longest)}")
        yield line


def _amount(size: int) -> str:
    return f"{size >> 20:,} MiB" if size >= 2**20 else f"{size:,} bytes"
