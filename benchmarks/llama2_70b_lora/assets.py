"""Fill the assets folder: base weights and tokenizer, which a run may read before ``run_start``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.llama2_70b_lora import base
from benchmarks.llama2_70b_lora.raw import BASE, TOKENIZER, RawRows
from common.data.placing import is_there, place
from common.errors import CheckpointError, DataError
from common.formats.raw_files import listed


def place_assets(source: RawRows, assets_dir: Path) -> list[Path]:
    """Create hard links to tokenizer and base weights in ``assets_dir``, or copies if it is on another disk.

    Returns:
        Paths of the files in ``assets_dir``; empty if the raw data have neither.

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
    remedy = "delete {} or name another --assets-dir"
    for target, path in wanted.items():
        is_there(path, target, remedy.format(target.parent))
    for target, path in wanted.items():
        place(path, target, remedy.format(target.parent))
    return list(wanted)


def _refuse_others(folder: Path, names: Sequence[str]) -> None:
    """Raise :class:`DataError` if ``folder`` has weights other than ``names``, which are from another base."""
    strangers = sorted({path.name for path in listed(folder, "*.safetensors*")} - set(names))
    strangers = [name for name in strangers if not name.endswith(".partial")]
    if strangers:
        raise DataError(f"{folder} holds {strangers[0]} of another base; delete it or name another --assets-dir")
