"""The order of training samples: tars are drawn with replacement, then samples are drawn from a shuffle buffer.

This is the scheme of the reference (``WebDataset(resampled=True)`` and a shuffle buffer), as a pure function of
(seed, stream, position). A stream is one micro-batch of every global batch over all ranks
(:mod:`common.data.order`). It reads tar after tar, each in its stored order, into a buffer of B samples. Each draw
takes a sample from the buffer, and the next sample of the stream replaces it.

A drawn sample entered its buffer slot at the previous draw from that slot, or at the start. So a sample at any
position follows from the draws before it (about 8 B of them, almost always), and training can resume without a
replay.

Legend: N requested samples, S draws of a chunk, W draws of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.order import sample_generator

# Identify the random streams of a seed; the shared orders use 1 to 3.
_TURNS, _DRAWS = 4, 5
_CHUNK_TURNS = 256
_CHUNK_BUFFERS = 8
_SMALLEST_CHUNK = 4096
_KEPT_CHUNKS = 2  # a micro-batch may overlap two chunks


class ResampledStream:
    """The infinite sequence of samples of one stream.

    Args:
        samples: number of samples of each tar, 1 or more.
        buffer: B, the size of the shuffle buffer; 1 keeps the order of the stream.
        seed: seed of tars and draws.
        stream: index of the stream.
    """

    def __init__(self, samples: Sequence[int], buffer: int, seed: int, stream: int) -> None:
        self._samples = np.asarray(samples, np.int64)
        self._buffer, self._seed, self._stream = buffer, seed, stream
        self._chunk = max(_SMALLEST_CHUNK, _CHUNK_BUFFERS * buffer)
        self._entries: dict[int, NDArray[np.int64]] = {}
        self._turns = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)

    def take(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return samples ``first`` to ``first + count - 1`` (from 0) of the sequence.

        Returns:
            (N,) index of the tar, and (N,) index of the sample in it.
        """
        positions = np.arange(first, first + count)
        chunks = positions // self._chunk
        entered = np.empty(count, np.int64)
        for chunk in np.unique(chunks).tolist():
            mine = chunks == chunk
            entered[mine] = self._entered(chunk)[positions[mine] - chunk * self._chunk]
        return self._in_tars(entered)

    def _entered(self, chunk: int) -> NDArray[np.int64]:
        """Return (S,) positions in the stream of the samples that ``chunk`` draws."""
        if chunk not in self._entries:
            while len(self._entries) >= _KEPT_CHUNKS:
                del self._entries[min(self._entries)]
            self._entries[chunk] = self._trace(chunk)
        return self._entries[chunk]

    def _trace(self, chunk: int) -> NDArray[np.int64]:
        """Return what :meth:`_entered` caches, from as many earlier chunks of draws as needed."""
        draws_S = draws_W = self._draws(chunk)
        first = chunk
        before_S = _drawn_before(draws_W)
        while first and before_S.min() < 0:
            first -= 1
            draws_W = np.concatenate([self._draws(first), draws_W])
            before_S = _drawn_before(draws_W)[-self._chunk :]
        return np.where(before_S < 0, draws_S, before_S + first * self._chunk + self._buffer)

    def _draws(self, chunk: int) -> NDArray[np.int64]:
        """Return (S,) buffer slots."""
        return sample_generator(self._seed, _DRAWS, self._stream, chunk).integers(self._buffer, size=self._chunk)

    def _in_tars(self, numbers_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Convert positions in the stream to tars and positions within them."""
        while not len(self._ends) or self._ends[-1] <= numbers_N.max(initial=0):
            generator = sample_generator(self._seed, _TURNS, self._stream, len(self._turns) // _CHUNK_TURNS)
            turns = generator.integers(len(self._samples), size=_CHUNK_TURNS)
            start = self._ends[-1] if len(self._ends) else 0
            self._turns = np.concatenate([self._turns, turns])
            self._ends = np.concatenate([self._ends, start + np.cumsum(self._samples[turns])])
        turn_N = np.searchsorted(self._ends, numbers_N, side="right")
        tar_N = self._turns[turn_N]
        return tar_N, numbers_N - (self._ends[turn_N] - self._samples[tar_N])


def _drawn_before(draws_W: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (W,) the index of the previous draw of the same slot, or -1."""
    by_slot = np.argsort(draws_W, kind="stable")
    again = draws_W[by_slot[1:]] == draws_W[by_slot[:-1]]
    before_W = np.full(len(draws_W), -1)
    before_W[by_slot[1:][again]] = by_slot[:-1][again]
    return before_W
