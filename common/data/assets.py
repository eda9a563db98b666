"""The folder of what may be read before ``run_start`` and is no data: weights that training starts from, tokenizers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from common.data.preparation import require_space
from common.errors import DataError

_NOT_LINKED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


def assets_of(data_dir: Path) -> Path:
    """Where the assets of the data in ``data_dir`` lie unless the user says otherwise."""
    return data_dir.with_name(f"{data_dir.name}-assets")


def place(files: Mapping[Path, Path]) -> None:
    """Hard-link files to the assets, or copy them to another disk.

    Args:
        files: place in the assets to the file that belongs there.

    Raises:
        DataError: the disk is too small, or another file is in a place.
    """
    left = [(target, path) for target, path in files.items() if not _there(target, path)]
    for target, path in left:
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


def _there(target: Path, path: Path) -> bool:
    """Whether ``target`` is ``path`` already.

    Raises:
        DataError: it is another file.
    """
    if not target.exists():
        return False
    if target.samefile(path):
        return True
    mine, other = path.stat(), target.stat()
    if (mine.st_size, mine.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
        raise DataError(f"{target} is another file than {path}; delete {target.parent} or name another --assets-dir")
    return True
