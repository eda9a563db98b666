"""Prepared format: rows of tokens in memory-mapped numpy files.

``train_tokens.npy`` and ``eval_tokens.npy`` are int32 (rows, row length). ``eval_scored.npy`` is uint8 of the same
shape, with 1 for tokens that are scored; training scores all tokens. ``manifest.json`` has the numbers of rows and of
scored tokens, the row length, and the vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy

FORMAT = "llama2-rows/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=llama2_70b_lora --raw-dir RAW --data-dir DATA"
TOKENS = {"train": "train_tokens.npy", "eval": "eval_tokens.npy"}
SCORED = "eval_scored.npy"
SIZES = ("train_samples", "eval_samples", "row_length", "vocabulary")
"""Sizes that every manifest has; the last two must be equal to those of the model."""


class RowFacts(Protocol):
    """Required sizes of the rows."""

    @property
    def row_length(self) -> int:
        """Tokens per row."""
        ...

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the model."""
        ...


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a prepared folder.

    Attributes:
        train: training tokens, (R, S): rows of S tokens.
        eval: evaluation tokens, (R, S).
        eval_scored: (R, S), 1 for evaluation tokens that are scored.
        stand_in: whether the data are synthetic.
    """

    train: NDArray[np.int32]
    eval: NDArray[np.int32]
    eval_scored: NDArray[np.uint8]
    stand_in: bool


def open_rows(root: Path, facts: RowFacts) -> PreparedRows:
    """Map the rows of a prepared folder into memory.

    Raises:
        DataError: the folder is incomplete or damaged, or its rows are for another model.
    """
    found = read_manifest(root, facts)
    length = facts.row_length
    train, evaluation = ((found.counts[f"{split}_samples"], length) for split in TOKENS)
    return PreparedRows(
        _mapped(root / TOKENS["train"], np.int32, train),
        _mapped(root / TOKENS["eval"], np.int32, evaluation),
        _mapped(root / SCORED, np.uint8, evaluation),
        found.stand_in,
    )


def read_manifest(root: Path, facts: RowFacts) -> Manifest:
    """Read the manifest of ``root`` and check it against ``facts``.

    Raises:
        DataError: the manifest is missing, damaged, of another format, or belongs to data for another model.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, SIZES)
    for name in ("row_length", "vocabulary"):
        if found.counts[name] != getattr(facts, name):
            raise DataError(
                f"{root} has {name} {found.counts[name]} where the model has {getattr(facts, name)}: it is another "
                "data set than benchmark.facts is for; give the data_dir that belongs to this recipe"
            )
    for name in (*TOKENS.values(), SCORED):
        if name not in found.files:
            raise DataError(f"{root / manifest.NAME} names no {name}; run '{PREPARE_COMMAND}'")
    return found


def _mapped(path: Path, dtype: type, shape: tuple[int, int]) -> NDArray[Any]:
    remedy = f"run 'mlperf-suite verify benchmark=llama2_70b_lora --data-dir {path.parent}'"
    try:
        array: NDArray[Any] = npy.mapped(path)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); {remedy}") from error
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape} where {manifest.NAME} says {np.dtype(dtype)} of "
            f"{shape}; {remedy}"
        )
    return array
