"""Weights and draws of chains, and passes of steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.openfold.sampler import Draws, passes_of, weights_of


def test_weights_of_lengths_and_clusters() -> None:
    """Lengths count from 256 to 512; a cluster of four chains halves the weight."""
    lengths, clusters = [100, 256, 384, 512, 900, 512], [7, 7, 8, 7, 7, 9]
    assert weights_of(lengths, clusters).tolist() == [0.25, 0.25, 0.75, 0.5, 0.5, 1.0]


def test_chains_are_drawn_in_proportion_to_their_weights() -> None:
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    draws = Draws(weights, seed=3)
    found = [draws[position] for position in range(10_000)]
    counts = np.bincount([chain for chain, _ in found], minlength=4)
    assert counts[1] == 0
    assert counts / 10_000 == pytest.approx(weights / 8, abs=0.025)
    assert len({seed for _, seed in found}) == 10_000
    assert all(0 <= seed < 2**63 for _, seed in found)


def test_draws_depend_on_seed_and_position_alone() -> None:
    weights = np.ones(50)
    forward, backward = Draws(weights, 3), Draws(weights, 3)
    positions = [0, 5, 4095, 4096, 20_000]
    expected = [forward[position] for position in positions]
    assert [backward[position] for position in reversed(positions)] == expected[::-1]
    assert [Draws(weights, 4)[position] for position in positions] != expected


def test_each_number_of_passes_comes_once_in_a_block() -> None:
    passes = [passes_of(step, seed=1, recycling_iters=3) for step in range(400)]
    blocks = [tuple(passes[first : first + 4]) for first in range(0, 400, 4)]
    assert {tuple(sorted(block)) for block in blocks} == {(1, 2, 3, 4)}
    assert len(Counter(blocks)) > 12
    assert [passes_of(step, seed=2, recycling_iters=3) for step in range(400)] != passes
    assert {passes_of(step, seed=1, recycling_iters=0) for step in range(5)} == {1}
