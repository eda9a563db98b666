"""Test the order of samples against a shuffle buffer that is simulated step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.stable_diffusion import tar_order
from benchmarks.stable_diffusion.tar_order import ResampledStream

SAMPLES = [5, 1, 9, 4]


def _in_tar_order(stream: ResampledStream) -> Iterator[tuple[int, int]]:
    """Yield the samples of the stream's tars, each tar in its stored order."""
    turn = 0
    while True:
        stream._in_tars(np.array([10 * turn]))  # draws as many turns as that takes
        tar = int(stream._turns[turn])
        yield from ((tar, row) for row in range(SAMPLES[tar]))
        turn += 1


def _simulated(stream: ResampledStream, buffer: int, count: int) -> list[tuple[int, int]]:
    """Return the samples of a simulated buffer with the stream's draws."""
    rest = _in_tar_order(stream)
    held = [next(rest) for _ in range(buffer)]
    used = []
    for position in range(count):
        slot = stream._draws(position // stream._chunk)[position % stream._chunk]
        used.append(held[slot])
        held[slot] = next(rest)
    return used


def _taken(stream: ResampledStream, first: int, count: int) -> list[tuple[int, int]]:
    return [(int(tar), int(row)) for tar, row in zip(*stream.take(first, count), strict=True)]


@pytest.mark.parametrize("buffer", [1, 2, 7, 40])
def test_samples_equal_those_of_a_simulated_buffer(buffer, monkeypatch):
    monkeypatch.setattr(tar_order, "_SMALLEST_CHUNK", 16)
    monkeypatch.setattr(tar_order, "_CHUNK_BUFFERS", 1)  # small enough that many draws depend on earlier chunks

    stream = ResampledStream(SAMPLES, buffer, seed=3, stream=1)

    assert _taken(stream, 0, 1500) == _simulated(ResampledStream(SAMPLES, buffer, seed=3, stream=1), buffer, 1500)


@pytest.mark.parametrize("first", [1, 4095, 8190, 20_000])
def test_any_position_can_be_computed_alone(first):
    whole = _taken(ResampledStream(SAMPLES, 100, seed=3, stream=0), 0, 20_100)

    assert _taken(ResampledStream(SAMPLES, 100, seed=3, stream=0), first, 100) == whole[first : first + 100]


def test_the_order_of_requests_changes_nothing():
    stream, other = (ResampledStream(SAMPLES, 30, seed=5, stream=2) for _ in range(2))
    pieces = [_taken(stream, first, 7) for first in (9100, 0, 7, 4093, 9107, 0)]

    assert pieces == [_taken(other, first, 7) for first in (9100, 0, 7, 4093, 9107, 0)]
    assert pieces[1] == pieces[-1]


def test_a_buffer_of_one_keeps_the_order():
    taken = _taken(ResampledStream([50], 1, seed=1, stream=0), 0, 120)

    assert taken == [(0, row % 50) for row in range(120)]


def test_a_buffer_neither_loses_nor_repeats_samples():
    taken = _taken(ResampledStream([10_000], 64, seed=1, stream=0), 0, 9000)

    assert len(set(taken)) == 9000
    assert max(row for _, row in taken) < 9000 + 64
    assert taken != sorted(taken)
    ahead = [row - position for position, (_, row) in enumerate(taken)]
    assert max(ahead) < 64


def test_tars_are_drawn_uniformly_with_replacement():
    taken = _taken(ResampledStream([1] * 20, 1, seed=7, stream=0), 0, 20_000)

    counts = Counter(tar for tar, _ in taken)
    expected = 20_000 / 20
    statistic = sum((counts[tar] - expected) ** 2 / expected for tar in range(20))
    assert statistic < 43.8  # chi squared of 19 degrees of freedom, 1 in 1,000
    first = [tar for tar, _ in taken[:20]]
    assert len(set(first)) < 20  # with replacement


def test_seeds_and_streams_have_different_orders():
    orders = [
        _taken(ResampledStream([1000] * 8, 100, seed, stream), 0, 50)
        for seed, stream in ((1, 0), (1, 1), (2, 0), (2, 1))
    ]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
