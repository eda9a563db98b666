"""Finished games for the tests of MiniGo's records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Finished(NamedTuple):
    bits: NDArray[np.uint8]
    pi: NDArray[np.float32]
    outcome: float


def game(length: int, number: int, board: int = 5) -> Finished:
    """Return a game whose records can be recognised: the first two bytes are game and record."""
    bits = np.zeros((length, -(-13 * board**2 // 8)), np.uint8)
    bits[:, 0], bits[:, 1] = number, np.arange(length)
    pi = np.random.default_rng(number).dirichlet(np.ones(board**2 + 1), length).astype(np.float32)
    return Finished(bits, pi, 1 if number % 2 else -1)
