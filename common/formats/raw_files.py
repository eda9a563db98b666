"""Listings of data folders and archives, without the files that operating systems and notebooks leave there."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

LEFT_BEHIND = frozenset({"__macosx", "$recycle.bin", "@eadir", "desktop.ini", "ehthumbs.db", "lost+found", "thumbs.db"})
"""Ignored names in lower case, in addition to all that begin with a dot (``.DS_Store``, ``._a.jpg``)."""


def is_data(name: str) -> bool:
    """Return whether the file with this path below its folder, or in its archive, may be part of a data set."""
    parts = PurePosixPath(name).parts
    return not any(part.lower() in LEFT_BEHIND or (part.startswith(".") and part != "..") for part in parts)


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Return files and folders below ``folder`` that match a glob, sorted, and may be part of a data set."""
    return sorted(path for path in folder.glob(pattern) if is_data(path.relative_to(folder).as_posix()))
