"""Files that have to lie in another folder too: linked there, or copied to another disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from common.data.preparation import require_space
from common.errors import DataError

_NOT_LINKED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


def assets_of(data_dir: Path) -> Path:
    """Where lies, unless the user says otherwise, what may be read before ``run_start`` and is no data."""
    return data_dir.with_name(f"{data_dir.name}-assets")


def place(path: Path, target: Path, remedy: str) -> None:
    """Hard-link ``path`` to ``target``, or copy it where that is another disk; nothing to do where it is there.

    Args:
        path: a file.
        target: its other name, in a folder that is made if need be.
        remedy: what to do where another file has this name.

    Raises:
        DataError: another file has the name, or the disk is too small for a copy.
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
    """Whether ``target`` is ``path``, or a copy of it, already.

    Raises:
        DataError: it is another file; with the ``remedy``.
    """
    if not target.exists():
        return False
    if target.samefile(path):
        return True
    mine, other = path.stat(), target.stat()
    if (mine.st_size, mine.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
        raise DataError(f"{target} is another file than {path}; {remedy}")
    return True
