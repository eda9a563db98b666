"""Evaluation set: sequences of the held-out articles, sampled at regular intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.bert.preparation import hdf5_varlength
from benchmarks.bert.preparation.samples import SampleSettings, create_samples, read_documents
from benchmarks.bert.preparation.tokenizer import Tokenizer, read_vocabulary
from common.errors import DataError


def write_evaluation_set(
    text: Path, vocabulary_file: Path, settings: SampleSettings, wanted: int, path: Path
) -> dict[str, int]:
    """Create sequences from ``text`` and write ``wanted`` of them to an unpacked file.

    Returns:
        ``samples``, the number of written sequences, and ``candidates``, the number of created sequences.

    Raises:
        DataError: the text or the vocabulary is damaged, or the text is too short.
    """
    vocabulary = read_vocabulary(vocabulary_file)
    candidates = create_samples(read_documents(text, Tokenizer(vocabulary)), vocabulary, settings)
    hdf5_varlength.write(path, candidates.take(pick(len(candidates), wanted, text)))
    return {"samples": wanted, "candidates": len(candidates)}


def pick(candidates: int, wanted: int, text: Path) -> np.ndarray:
    """Return the indices of the selected candidates: int(i * (candidates / wanted)), with a Python float quotient.

    Raises:
        DataError: there are fewer candidates than wanted.
    """
    if candidates < wanted:
        raise DataError(f"{text} makes {candidates} sequences where {wanted} are needed for evaluation: too short")
    stride = candidates / wanted
    return np.array([int(number * stride) for number in range(wanted)], np.int64)
