"""The folder of what may be read before ``run_start``: base weights and tokenizer, which are no data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.llama2_70b_lora import base
from benchmarks.llama2_70b_lora.raw import BASE, TOKENIZER, RawRows
from common.data.placing import is_there, place
from common.errors import CheckpointError, DataError
from common.formats.raw_files import listed


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
    remedy = "delete {} or name another --assets-dir"
    for target, path in wanted.items():
        is_there(path, target, remedy.format(target.parent))
    for target, path in wanted.items():
        place(path, target, remedy.format(target.parent))
    return list(wanted)


def _refuse_others(folder: Path, names: Sequence[str]) -> None:
    """Raise :class:`DataError` if ``folder`` holds weights beside ``names``: those of another base."""
    strangers = sorted({path.name for path in listed(folder, "*.safetensors*")} - set(names))
    strangers = [name for name in strangers if not name.endswith(".partial")]
    if strangers:
        raise DataError(f"{folder} holds {strangers[0]} of another base; delete it or name another --assets-dir")
