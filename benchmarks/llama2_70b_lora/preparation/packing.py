"""Token lists to rows of one length, in the pieces in which the reference's preparation works.

The reference (mlcommons/training, llama2_70b_lora/scripts/utils.py) concatenates all token lists of a piece, cuts them
into rows and drops what is left at the end. Its pieces are those of the ``datasets`` library: equal contiguous shares,
one for each process, cut into batches of 1,000 examples. So the number of processes is part of the definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROCESSES = {"train": 8, "eval": 2}
"""Shares of each split (utils.py, ``num_proc``)."""
BATCH = 1000
"""Examples of a piece at most (``datasets``, ``map(batch_size=1000)``)."""
LEFT_OUT = -100
"""The label of tokens that are not scored, in the reference's rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of one split.

    Attributes:
        tokens: int32, (R, S): R rows of S tokens.
        scored: bool, (R, S): whether each token is one that the loss asks for.
    """

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Example:
    """A text as tokens.

    Attributes:
        tokens: the whole example, from BOS to EOS.
        prompt: how many of them, from the first on, ask for the answer.
    """

    tokens: Sequence[int]
    prompt: int

    def scored(self) -> NDArray[np.bool_]:
        """The answer, without the example's final token."""
        places = np.arange(len(self.tokens))
        return (places >= self.prompt) & (places < len(self.tokens) - 1)


def pieces(examples: int, processes: int, batch: int = BATCH) -> Iterator[range]:
    """The examples of each piece, in their order.

    Args:
        examples: how many there are.
        processes: shares; fewer examples than that make fewer shares.
        batch: examples of a piece at most.
    """
    processes = min(processes, examples)
    for process in range(processes):
        share, longer = divmod(examples, processes)
        start = share * process + min(process, longer)
        end = start + share + (process < longer)
        for first in range(start, end, batch):
            yield range(first, min(first + batch, end))


def pack(examples: Sequence[Example], row_length: int, processes: int, answers_only: bool) -> Rows:
    """Rows of ``row_length`` tokens; examples may run over from one into the next.

    Args:
        examples: in their order, none longer than a row.
        row_length: S.
        processes: see :func:`pieces`.
        answers_only: whether the loss asks for the answers only, or for every token.
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
    return Rows(np.concatenate(tokens), np.concatenate(scored))
