"""What lies below a folder that a stranger may have filled: names and kinds only, nothing is opened or followed."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import DataError

DEPTH = 32
"""Folders within each other."""
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
    """The content of a folder; paths are relative to it, in order.

    Attributes:
        folder: it.
        files: regular files, and their sizes in bytes.
        folders: all below it.
        special: links, pipes, sockets and devices, and which of them each is.
        unfit: what was not looked into, each with the reason, as a sentence that names it: names that cannot be
            printed, folders that cannot be read or lie too deep.
    """

    folder: Path
    files: dict[PurePosixPath, int]
    folders: tuple[PurePosixPath, ...]
    special: dict[PurePosixPath, str]
    unfit: tuple[str, ...]

    def within(self, folder: PurePosixPath) -> list[PurePosixPath]:
        """The regular files directly in ``folder``."""
        return [path for path in self.files if path.parent == folder]


def find_files(folder: Path) -> FoundFiles:
    """Everything below ``folder``.

    Raises:
        DataError: the folder itself cannot be read, or has more entries than any submission.
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
    """Name, mode and size of each entry."""
    with os.scandir(folder) as entries:
        found: list[tuple[str, int, int]] = []
        for entry in entries:
            if len(found) > ENTRIES:
                break
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # a run that goes on has files that come and go
                continue
            found.append((entry.name, status.st_mode, status.st_size))
        return found
