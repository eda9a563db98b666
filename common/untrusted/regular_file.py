"""Opening what may be anything: a pipe would wait for ever, a device has no end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from common.errors import DataError

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
        path: the file.
        follow: whether it may be a symbolic link to one.

    Raises:
        DataError: it is none, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(mode := path.stat(follow_symlinks=follow).st_mode):
            raise DataError(f"{path}: is {_KINDS.get(stat.S_IFMT(mode), 'a link')}, no regular file")
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in between
        file.close()
        raise DataError(f"{path}: is no regular file")
    return file
