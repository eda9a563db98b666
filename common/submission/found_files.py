"""List the content of an untrusted folder: only names, types and sizes. No file is opened and no link is followed."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import DataError

DEPTH = 32
"""Largest number of nested folders."""
ENTRIES = 500_000

_KINDS = {
    stat.S_IFLNK: "is a link",
    stat.S_IFIFO: "is a pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


@dataclass(frozen=True)
class FoundFiles:
    """The content of a folder. Paths are relative to it.

    Attributes:
        files: size of each regular file in bytes, sorted by path.
        folders: all folders below it, sorted.
        special: links, pipes, sockets and devices, each with its type as a phrase such as "is a link".
        unfit: one message for each entry that was skipped: names that cannot be printed, and folders that cannot be
            read or are too deep.
    """

    folder: Path
    files: dict[PurePosixPath, int]
    folders: tuple[PurePosixPath, ...]
    special: dict[PurePosixPath, str]
    unfit: tuple[str, ...]

    def within(self, folder: PurePosixPath) -> list[PurePosixPath]:
        """Return the regular files directly in ``folder``."""
        return [path for path in self.files if path.parent == folder]


def find_files(folder: Path) -> FoundFiles:
    """Return all files, folders and special files below ``folder``.

    Raises:
        DataError: the folder itself cannot be read, or has more than ``ENTRIES`` entries.
    """
    files: dict[PurePosixPath, int] = {}
    folders: list[PurePosixPath] = []
    special: dict[PurePosixPath, str] = {}
    unfit: list[str] = []
    waiting = [PurePosixPath()]
    while waiting:
        at = waiting.pop()
        try:
            entries = _entries(folder / at)
        except OSError as error:
            reason = f"{folder / at}: cannot be read: {error.strerror}"
            if at == PurePosixPath():
                raise DataError(reason) from error
            unfit.append(reason)
            continue
        for name, mode, size in entries:
            path = at / name
            if not name.isprintable():
                unfit.append(f"{folder / at}: has {name!a}, a name that cannot be printed: rename it")
            elif kind := _KINDS.get(stat.S_IFMT(mode)):
                special[path] = kind
            elif not stat.S_ISDIR(mode):
                files[path] = size
            elif len(path.parts) > DEPTH:
                unfit.append(f"{folder / path}: lies more than {DEPTH} folders deep: nothing looks there")
            else:
                folders.append(path)
                waiting.append(path)
        if len(files) + len(folders) + len(special) + len(unfit) > ENTRIES:
            raise DataError(f"{folder}: has more than {ENTRIES} files: name the folder of the results")
    return FoundFiles(folder, dict(sorted(files.items())), tuple(sorted(folders)), special, tuple(unfit))


def _entries(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, mode and size of each entry, for at most ``ENTRIES`` + 1 entries."""
    with os.scandir(folder) as entries:
        found: list[tuple[str, int, int]] = []
        for entry in entries:
            if len(found) > ENTRIES:
                break
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # an active run creates and deletes files
                continue
            found.append((entry.name, status.st_mode, status.st_size))
        return found
