"""Provide files in a second folder: as hard links, or as copies on another disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from common.data.preparation import require_space
from common.errors import DataError

_NOT_LINKED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


def assets_of(data_dir: Path) -> Path:
    """Default assets folder: files such as vocabularies and checkpoints, which a run may read before ``run_start``."""
    return data_dir.with_name(f"{data_dir.name}-assets")


def place(path: Path, target: Path, remedy: str) -> None:
    """Hard-link ``path`` to ``target``, or copy it if a link is not possible. Does nothing if ``target`` is that file.

    A copy with the same size and modification time counts as that file.

    Args:
        target: new name of the file; its folder is created if needed.
        remedy: advice to the user if ``target`` is another file, for the message.

    Raises:
        DataError: ``target`` is another file, or the disk is too small for a copy.
    """
    if is_there(path, target, remedy):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        os.link(path.resolve(), beside)
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
        require_space(target.parent, path.stat().st_size)
        shutil.copy2(path, beside)
    beside.replace(target)


def is_there(path: Path, target: Path, remedy: str) -> bool:
    """Return whether ``target`` exists and is ``path``, or a copy of it with the same size and time.

    Raises:
        DataError: ``target`` is another file; the message includes ``remedy``.
    """
    if not target.exists():
        return False
    if target.samefile(path):
        return True
    mine, other = path.stat(), target.stat()
    if (mine.st_size, mine.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
        raise DataError(f"{target} is another file than {path}; {remedy}")
    return True
