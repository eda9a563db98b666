"""The folder of what may be read before ``run_start``: base weights and tokenizer, which are no data."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.llama2_70b_lora import base
from benchmarks.llama2_70b_lora.raw import TOKENIZER, RawRows
from common.data.preparation import require_space
from common.errors import CheckpointError, DataError

BASE = "base"
"""The folder of the base weights in the assets."""
_NOT_LINKED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


def assets_of(data_dir: Path) -> Path:
    """Where the assets of the data in ``data_dir`` lie unless the user says otherwise."""
    return data_dir.with_name(f"{data_dir.name}-assets")


def place_assets(source: RawRows, assets_dir: Path) -> list[Path]:
    """Hard-link tokenizer and base weights of the raw data to ``assets_dir``, or copy them to another disk.

    Returns:
        The files, which is none where the raw data have neither.

    Raises:
        DataError: the raw base is incomplete, the disk is too small, or ``assets_dir`` has another base or tokenizer.
    """
    wanted: dict[Path, Path] = {}
    if source.tokenizer is not None:
        wanted[assets_dir / TOKENIZER] = source.tokenizer
    if source.base is not None:
        try:
            files = base.files_of(source.base)
        except CheckpointError as error:
            raise DataError(str(error)) from error
        if missing := [path for path in files if not path.is_file()]:
            raise DataError(f"{missing[0]} is missing: the base weights are incomplete")
        wanted |= {assets_dir / BASE / path.name: path for path in files}
        _refuse_others(assets_dir / BASE, [path.name for path in files])
    left = [(target, path) for target, path in wanted.items() if not _there(target, path)]
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
    return list(wanted)


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


def _refuse_others(folder: Path, names: Sequence[str]) -> None:
    """Raise :class:`DataError` if ``folder`` holds weights beside ``names``: those of another base."""
    strangers = sorted({path.name for path in folder.glob("*.safetensors*")} - set(names))
    strangers = [name for name in strangers if not name.endswith(".partial")]
    if strangers:
        raise DataError(f"{folder} holds {strangers[0]} of another base; delete it or name another --assets-dir")
