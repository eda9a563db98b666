"""Pack tokenized examples into rows of equal length, in the same pieces as the reference preparation.

The reference (mlcommons/training, llama2_70b_lora/scripts/utils.py) concatenates all tokens of a piece, splits them
into rows and drops the remainder. The ``datasets`` library makes the pieces: one contiguous share of equal size per
process, split into batches of 1,000 examples. Therefore the number of processes is part of the definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROCESSES = {"train": 8, "eval": 2}
"""Number of processes for each split (``num_proc`` in utils.py)."""
BATCH = 1000
"""Maximum number of examples in a piece (``map(batch_size=1000)`` in ``datasets``)."""
LEFT_OUT = -100
"""Label of tokens that are not scored, in the rows of the reference."""


@dataclass(frozen=True)
class PackedExamples:
    """Rows of one split.

    Attributes:
        tokens: int32, (R, S): R rows of S tokens.
        scored: bool, (R, S): whether each token is scored as a label.
    """

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Example:
    """Tokenized prompt and answer.

    Attributes:
        tokens: all tokens, from BOS to EOS.
        prompt: number of tokens in the prompt, with BOS.
    """

    tokens: Sequence[int]
    prompt: int

    def scored(self) -> NDArray[np.bool_]:
        """Return a mask of the answer, without the last token of the example."""
        places = np.arange(len(self.tokens))
        return (places >= self.prompt) & (places < len(self.tokens) - 1)


def pieces(examples: int, processes: int, batch: int = BATCH) -> Iterator[range]:
    """Yield the indices of the examples in each piece, in order.

    Args:
        processes: number of shares; with fewer examples, one share per example.
        batch: maximum number of examples in a piece.
    """
    processes = min(processes, examples)
    for process in range(processes):
        share, longer = divmod(examples, processes)
        start = share * process + min(process, longer)
        end = start + share + (process < longer)
        for first in range(start, end, batch):
            yield range(first, min(first + batch, end))


def pack(examples: Sequence[Example], row_length: int, processes: int, answers_only: bool) -> PackedExamples:
    """Return full rows of ``row_length`` tokens; examples may continue in the next. The rest of a piece is dropped.

    Args:
        examples: examples in order, none longer than a row.
        answers_only: score only the answers instead of every token.
    """
    tokens, scored = [np.empty((0, row_length), np.int32)], [np.empty((0, row_length), np.bool_)]
    for piece in pieces(len(examples), processes):
        members = [examples[number] for number in piece]
        every = np.concatenate([np.asarray(example.tokens, np.int32) for example in members])
        rows = len(every) // row_length
        tokens.append(every[: rows * row_length].reshape(rows, row_length))
        if answers_only:
            marks = np.concatenate([example.scored() for example in members])
        else:
            marks = np.ones(len(every), np.bool_)
        scored.append(marks[: rows * row_length].reshape(rows, row_length))
    return PackedExamples(np.concatenate(tokens), np.concatenate(scored))
