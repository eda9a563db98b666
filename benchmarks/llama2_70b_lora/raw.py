"""Raw data in ``--raw-dir``: texts and a tokenizer, or packed rows; and the base weights.

- ``train.jsonl``, ``validation.jsonl`` (SCROLLS, gov_report) and ``tokenizer.model`` (of Llama 2);
- ``train-00000-of-00001.parquet`` …, ``validation-00000-of-00001.parquet`` … (data set of the reference);
- ``train.npy`` and ``validation.npy`` (the same rows as the submissions by NVIDIA convert them).

Rows, tokenizer and base weights may each be in a subfolder, such as ``gov_report`` and ``base``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.llama2_70b_lora.base import INDEX, SINGLE
from common.data.manifest import digest
from common.data.raw_layout import find_file, require_parts
from common.data.synthetic import MARKER, description_of
from common.errors import ConfigError, DataError
from common.formats.raw_files import listed

Kind = Literal["text", "parquet", "object arrays"]

TOKENIZER = "tokenizer.model"
TOKENIZER_SHA256 = "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"
"""SHA-256 of the tokenizer of Llama 2, as stated in its Hugging Face repositories."""
BASE = "base"
"""Folder name of the base weights in synthetic data and in the assets; elsewhere it may have another name."""
SPLITS = {"train": "train", "eval": "validation"}
"""Our names of the splits, and their names in file names."""
_NAMES: dict[Kind, str] = {"text": "{}.jsonl", "parquet": "{}-*-of-*.parquet", "object arrays": "{}.npy"}


@dataclass(frozen=True)
class RowSettings:
    """Sizes of a preparation; the defaults are those of the benchmark.

    Attributes:
        vocabulary: vocabulary size of the model.
        train_rows, eval_rows: number of rows of each split, from the start; None for all.
    """

    row_length: int = 8192
    vocabulary: int = 32000
    train_rows: int | None = None
    eval_rows: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (type(value) is int and value >= 1):
                raise ConfigError(f"{name}={value}: a number of at least 1")
        if self.row_length < 2:
            raise ConfigError(f"row_length={self.row_length}: a row has a token and a next one")

    def rows(self, split: str) -> int | None:
        """Return the number of rows to use of ``split``; None for all."""
        return self.train_rows if split == "train" else self.eval_rows


@dataclass(frozen=True)
class RawRows:
    """Input files of a preparation.

    Attributes:
        files: sorted files of each split.
        tokenizer: path of the tokenizer; may be None except for texts.
        base: folder of the base weights, or None.
        synthetic: description of synthetic data; None for those of the benchmark.
    """

    kind: Kind
    files: Mapping[str, list[Path]]
    tokenizer: Path | None
    base: Path | None
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return the SHA-256 of all files that determine the rows, independent of their paths; reads them fully."""
        named = [("tokenizer", self.tokenizer)] if self.kind == "text" and self.tokenizer else []
        named += [(split, path) for split, paths in self.files.items() for path in paths]
        lines = [f"{self.kind}\n", *(f"{name} {digest(path, 'sha256')}\n" for name, path in named)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_raw(raw_dir: Path) -> RawRows:
    """Find the raw data in ``raw_dir``.

    Raises:
        DataError: the folder, a split or the tokenizer is missing, there is more than one kind of rows, or
            ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; put the data set there or generate synthetic data")
    folder, kind = _only_kind(raw_dir)
    files = {split: listed(folder, _NAMES[kind].format(name)) for split, name in SPLITS.items()}
    for split, paths in files.items():
        if not paths:
            raise DataError(f"{folder / _NAMES[kind].format(SPLITS[split])} is missing beside the other split's")
        if kind == "parquet":
            require_parts(paths)
    tokenizer = find_file(raw_dir, TOKENIZER)
    if kind == "text" and tokenizer is None:
        raise DataError(f"{folder / TOKENIZER} is missing: texts need Llama 2's tokenizer")
    weights = find_file(raw_dir, INDEX, SINGLE, "*.safetensors")
    base = weights.parent if weights is not None else raw_dir / BASE if (raw_dir / BASE).is_dir() else None
    synthetic = description_of(raw_dir, *files["train"], *filter(None, (tokenizer, weights)))
    return RawRows(kind, files, tokenizer, base, synthetic)


def settings_of(source: RawRows) -> RowSettings:
    """Return the sizes of ``source``: from ``SYNTHETIC`` for synthetic data, otherwise those of the benchmark.

    Raises:
        DataError: the settings in ``SYNTHETIC`` are missing or invalid.
    """
    if source.synthetic is None:
        return RowSettings()
    try:
        return RowSettings(**source.synthetic["settings"])
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{MARKER} of the raw data has missing or invalid settings: {error}") from error


def _only_kind(raw_dir: Path) -> tuple[Path, Kind]:
    found: list[tuple[Path, Kind]] = [
        (path.parent, kind)
        for kind, name in _NAMES.items()
        if (path := find_file(raw_dir, *map(name.format, SPLITS.values()))) is not None
    ]
    if not found:
        raise DataError(
            f"{raw_dir} holds no train.jsonl, no train-*-of-*.parquet and no train.npy; 'mlperf-suite download "
            "benchmark=llama2_70b_lora' says where they are"
        )
    if len(found) > 1:
        several = " and ".join(f"{kind} in {folder}" for folder, kind in found)
        raise DataError(f"{raw_dir} holds {several}; leave one of them there")
    return found[0]
