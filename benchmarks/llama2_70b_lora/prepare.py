"""Download, prepare, verify and generate the data of Llama-2-70B LoRA: government reports as rows of tokens.

:mod:`benchmarks.llama2_70b_lora.raw` describes the input, :mod:`benchmarks.llama2_70b_lora.data` the output. Base
weights and tokenizer go to a separate assets folder, because a run may read them before ``run_start``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.llama2_70b_lora import base, raw
from benchmarks.llama2_70b_lora.data import FORMAT, PREPARE_COMMAND, SCORED, TOKENS
from benchmarks.llama2_70b_lora.preparation.examples import read_tokenizer, rows_of_texts
from benchmarks.llama2_70b_lora.preparation.packing import PackedExamples
from benchmarks.llama2_70b_lora.preparation.published import check_rows, rows_of_object_array, rows_of_parquet
from benchmarks.llama2_70b_lora.raw import BASE, MARKER, TOKENIZER, RawRows, RowSettings
from benchmarks.llama2_70b_lora.synthetic import generate
from common.data import atomic, manifest, preparation
from common.data.commands import AssetsDir, DataCommands
from common.data.manifest import Manifest, digest
from common.data.options import Option
from common.data.preparation import assets_of, is_there, link_or_copy, preparing
from common.data.published import Published
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
        link_or_copy(path, target, remedy.format(target.parent))
    return list(wanted)


def _refuse_others(folder: Path, names: Sequence[str]) -> None:
    """Raise :class:`DataError` if ``folder`` has weights other than ``names``, which are from another base."""
    strangers = sorted({path.name for path in listed(folder, "*.safetensors*")} - set(names))
    strangers = [name for name in strangers if not name.endswith(".partial")]
    if strangers:
        raise DataError(f"{folder} holds {strangers[0]} of another base; delete it or name another --assets-dir")


PUBLISHED = Published(
    {
        "train_samples": 3901,
        "eval_samples": 173,
        "row_length": RowSettings().row_length,
        "vocabulary": RowSettings().vocabulary,
    }
)
"""Sizes of the data set from MLCommons."""
ORIGINS = {"text": "texts", "parquet": "the reference's rows", "object arrays": "NVIDIA's rows"}
"""Descriptions of raw data by their kind."""


def prepare(
    raw_dir: Path,
    data_dir: Path,
    row_length: Annotated[int | None, Option("tokens per row (default: 8192, or the number in SYNTHETIC)")] = None,
    assets_dir: AssetsDir = None,
    workers: int = 1,
) -> Manifest:
    """Write the prepared rows and the assets; do nothing if both are complete.

    Args:
        row_length: other lengths of real texts than the benchmark's give custom data.
        assets_dir: folder for base and tokenizer.
        workers: number of tokenizer threads.

    Raises:
        ConfigError: the row length is too small.
        DataError: the raw data are missing or damaged, or have other rows than requested; or ``data_dir`` or
            ``assets_dir`` has data from another source.
    """
    source = raw.open_raw(raw_dir)
    settings = raw.settings_of(source)
    if row_length is not None:
        settings = dataclasses.replace(settings, row_length=row_length)
    if source.kind == "text":
        _check_tokenizer(source, settings)
    wanted = {"fingerprint": source.fingerprint(), "settings": json.dumps(dataclasses.asdict(settings), sort_keys=True)}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        place_assets(source, assets_dir or assets_of(data_dir))
        if job.found is not None:
            return job.found
        splits = {split: _read(source, split, settings, workers) for split in raw.SPLITS}
        arrays = {TOKENS[split]: rows.tokens for split, rows in splits.items()}
        arrays[SCORED] = splits["eval"].scored.astype(np.uint8)
        preparation.require_space(data_dir, sum(array.nbytes for array in arrays.values()), more=False)
        for name, array in arrays.items():
            atomic.save(data_dir / name, array)
        files = manifest.describe_files(data_dir, arrays)
        return job.finish(files, _counts(splits, settings), f"SCROLLS gov_report, {ORIGINS[source.kind]}")


def verify(data_dir: Path) -> Manifest:
    """Check all checksums of ``data_dir``; raise :class:`DataError` at the first difference."""
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)


def _check_tokenizer(source: RawRows, settings: RowSettings) -> None:
    """Raise :class:`DataError` if the tokenizer is not that of the benchmark, or has too many tokens."""
    assert source.tokenizer is not None
    if source.synthetic is None and (found := digest(source.tokenizer, "sha256")) != raw.TOKENIZER_SHA256:
        raise DataError(
            f"{source.tokenizer}: SHA-256 {found} where Llama 2's has {raw.TOKENIZER_SHA256}: fetch it again; for "
            f"other text put a file {MARKER} beside it that says what it is"
        )
    size = read_tokenizer(source.tokenizer).vocab_size()
    if size > settings.vocabulary:
        raise DataError(f"{source.tokenizer} has {size} tokens, which exceeds a vocabulary of {settings.vocabulary}")


def _read(source: RawRows, split: str, settings: RowSettings, workers: int) -> PackedExamples:
    """Read and check the rows of a split."""
    made = []
    for path in source.files[split]:
        if source.kind == "text":
            assert source.tokenizer is not None
            rows = rows_of_texts(path, split, read_tokenizer(source.tokenizer), settings.row_length, workers)
        elif source.kind == "parquet":
            rows = rows_of_parquet(path, settings.row_length)
        else:
            rows = rows_of_object_array(path, settings.row_length)
        check_rows(path, rows, settings.vocabulary, every_token_scored=split == "train")
        made.append(rows)
    tokens_RS = np.concatenate([rows.tokens for rows in made])
    scored_RS = np.concatenate([rows.scored for rows in made])
    asked = settings.rows(split)
    if len(tokens_RS) < (asked or 1):
        where = source.files[split][0]
        raise DataError(f"{where} gives {len(tokens_RS)} rows of {settings.row_length} tokens, expected {asked or 1}")
    return PackedExamples(tokens_RS[:asked], scored_RS[:asked])


def _counts(splits: dict[str, PackedExamples], settings: RowSettings) -> dict[str, int]:
    scored_RS = splits["eval"].scored[:, 1:]  # the first token of a row is never a label
    return {
        "train_samples": len(splits["train"]),
        "eval_samples": len(splits["eval"]),
        "row_length": settings.row_length,
        "vocabulary": settings.vocabulary,
        "eval_scored_rows": int(scored_RS.any(1).sum()),
        "eval_scored_tokens": int(scored_RS.sum()),
    }


COMMANDS = DataCommands(
    "llama2_70b_lora",
    raw="rows, or texts and tokenizer, and base weights",
    prepared="prepared rows",
    real="SCROLLS gov_report",
    generate=generate,
    prepare=prepare,
    verify=verify,
    assets=((BASE,),),
    published=PUBLISHED,
)
