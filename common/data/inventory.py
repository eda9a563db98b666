"""Find the files of ``sources.yaml`` in a raw folder, in any subfolders that other tools use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from common.data.remote_file import RemoteFile
from common.data.sources import SourceSet
from common.formats.raw_files import is_data

_DEPTH = 6
"""Levels of folders below the raw folder that are searched."""


class Inventory:
    """Index by name of the files and folders below a raw folder."""

    def __init__(self, raw_dir: Path) -> None:
        self.raw_dir = raw_dir
        self._folders: dict[str, list[str]] = {}
        for folder, below, names in os.walk(raw_dir):
            relative = Path(folder).relative_to(raw_dir).as_posix()
            below[:] = sorted(name for name in below if is_data(name) and not name.endswith(".partial"))
            if relative.count("/") >= _DEPTH:
                below.clear()
            for name in (*names, *below):
                self._folders.setdefault(name, []).append("" if relative == "." else relative)

    def find(self, name: str) -> Path | None:
        """Return the file or folder whose path ends with ``name``, with or without ``.gz``; None if there is none."""
        for wanted in (name, name.removesuffix(".gz")):
            path = PurePosixPath(wanted)
            ends = () if str(path.parent) == "." else path.parent.parts
            for folder in sorted(self._folders.get(path.name, ()), key=len):
                parts = PurePosixPath(folder).parts if folder else ()
                if parts[len(parts) - len(ends) :] == ends:
                    return self.raw_dir / folder / path.name
        return None

    def count(self, pattern: str) -> int:
        """Return the number of files whose path ends with ``pattern``, such as ``folder/*.tar``."""
        folder, _, name = pattern.rpartition("/")
        return sum(
            fnmatch(f"/{below}", f"*/{folder}")
            for file, folders in self._folders.items()
            if fnmatch(file, name)
            for below in folders
        )

    def find_file(self, file: RemoteFile, also_in: Sequence[str]) -> Path | None:
        """Return the file under one of its names, or in a folder of ``also_in`` (``*`` means any folder)."""
        base = PurePosixPath(file.name).name
        names = [file.name, *file.other_names, *(base if folder == "*" else f"{folder}/{base}" for folder in also_in)]
        return next((path for name in names if (path := self.find(name)) is not None), None)

    def is_replaced(self, file: RemoteFile, source: SourceSet) -> bool:
        """Return whether all paths exist that replace the file, such as the folders unpacked from it."""
        instead = source.instead.get(file.name, ())
        return bool(instead) and all(_has_content(self.find(name)) for name in instead)

    def present(self, source: SourceSet) -> int:
        """Return the number of files of a set that are present."""
        found = sum(self.find_file(file, source.also_in) is not None for file in source.files)
        found += sum(self.is_replaced(file, source) for file in source.files)
        if source.tree is not None:
            found += self.count(source.tree["pattern"])
        return found


def _has_content(path: Path | None) -> bool:
    """Return whether a file is not empty, or a folder contains a file that is not empty, at any depth."""
    if path is None:
        return False
    return path.stat().st_size > 0 if path.is_file() else any(_has_content(below) for below in path.iterdir())
