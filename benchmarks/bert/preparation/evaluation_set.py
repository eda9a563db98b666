"""The evaluation set: sequences made of the held-out articles, of which every so-maniest is taken."""

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
    """Write ``wanted`` of the sequences of ``text`` as a file of single sequences.

    Returns:
        ``samples`` that were written and ``candidates`` that they were picked from.

    Raises:
        DataError: text or vocabulary are damaged, or the text makes fewer sequences.
    """
    vocabulary = read_vocabulary(vocabulary_file)
    candidates = create_samples(read_documents(text, Tokenizer(vocabulary)), vocabulary, settings)
    hdf5_varlength.write(path, candidates.take(pick(len(candidates), wanted, text)))
    return {"samples": wanted, "candidates": len(candidates)}


def pick(candidates: int, wanted: int, text: Path) -> np.ndarray:
    """Which of the candidates are taken: int(i * (candidates / wanted)), the quotient as a Python float.

    Raises:
        DataError: there are fewer than wanted.
    """
    if candidates < wanted:
        raise DataError(f"{text} makes {candidates} sequences where {wanted} are needed for evaluation: too short")
    stride = candidates / wanted
    return np.array([int(number * stride) for number in range(wanted)], np.int64)
