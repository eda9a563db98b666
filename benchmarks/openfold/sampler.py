"""Draws of training chains, and the number of passes of each step: functions of the seed and of a position.

Chains are drawn with replacement. The probability of a chain is proportional to its length, within limits, and to the
inverse root of the number of chains in its cluster.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.data.order import sample_generator

LENGTHS = 256, 512
"""Shorter and longer chains have the weight of these lengths."""
_DRAWS, _PASSES = 4, 5
"""Second parts of the keys of generators; :mod:`common.data.order` and :mod:`common.data.shard_streams` use 1 to 3."""
_CHUNK = 4096


def weights_of(lengths: ArrayLike, clusters: ArrayLike) -> NDArray[np.float64]:
    """Return the weight of each chain.

    Args:
        lengths: residues of each chain.
        clusters: cluster of each chain.
    """
    _, cluster, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    return np.clip(lengths, *LENGTHS) / LENGTHS[1] / np.sqrt(sizes[cluster])


class Draws:
    """An endless sequence of draws, each a chain and a seed for its features.

    Args:
        weight_S: (S,) weight of each chain.
    """

    def __init__(self, weight_S: NDArray[np.float64], seed: int) -> None:
        self._cumulative_S = np.cumsum(weight_S)
        self._seed = seed
        self._chunk = functools.lru_cache(maxsize=4)(self._drawn)

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return index of the chain, and a seed in [0, 2**63), of the draw at ``position``."""
        chunk, offset = divmod(position, _CHUNK)
        chains, seeds = self._chunk(chunk)
        return int(chains[offset]), int(seeds[offset])

    def _drawn(self, chunk: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        random = sample_generator(self._seed, _DRAWS, chunk)
        drawn = random.random(_CHUNK) * self._cumulative_S[-1]
        chains = np.searchsorted(self._cumulative_S, drawn, side="right")
        return np.minimum(chains, len(self._cumulative_S) - 1), random.integers(2**63, size=_CHUNK)


def passes_of(step: int, seed: int, recycling_iters: int) -> int:
    """Return the passes of an optimizer step: the recycling iterations plus 1.

    A block of ``recycling_iters + 1`` steps has each number of passes once, in a random order. All micro-batches and
    ranks of a step have the same number.
    """
    block, offset = divmod(step, recycling_iters + 1)
    return 1 + int(sample_generator(seed, _PASSES, block).permutation(recycling_iters + 1)[offset])
