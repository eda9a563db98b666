"""The order in which a pipeline stage works: a pure function of its place and of the numbers.

A stage has one part of the model or several, *chunks*: of p stages and v chunks, chunk c of stage r is the part c p + r
of the p v equal parts, so that a micro-batch goes round all stages v times. A *unit* of work is the forward or the
backward pass of one chunk on one micro-batch.

With one chunk this is 1F1B (Narayanan et al. 2021, section 2.2.1): p - r - 1 forward units, then both directions in
turn. With several it is interleaved 1F1B (section 2.2.2 there, and Megatron-LM): 2 (p - r - 1) + (v - 1) p forward
units first, or all m v if there are as many micro-batches m as stages, and micro-batches in rounds of p. Both leave
(p - 1) / (v m) of the working time idle.

In either order the units that one stage hands on come at its neighbour in the order in which that one wants them, so
that a queue between the two suffices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from common.errors import ConfigError

Direction = Literal["forward", "backward"]


class Unit(NamedTuple):
    """One chunk's pass on one micro-batch.

    Attributes:
        direction: of the pass.
        chunk: of the stage, from 0.
        micro_batch: of the iteration, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int


def check_numbers(stages: int, chunks: int, micro_batches: int) -> None:
    """Make sure that the order exists.

    Raises:
        ConfigError: a number is not positive, one stage has several chunks, or several chunks would not see full rounds
            of micro-batches.
    """
    for name, value in (("layout.pp", stages), ("chunks", chunks), ("micro-batches", micro_batches)):
        if value < 1:
            raise ConfigError(f"a pipeline of {name}={value}: use at least 1")
    if stages == 1 and chunks > 1:
        raise ConfigError(f"layout.pp=1 with {chunks} chunks of the model: a single stage has 1")
    if chunks > 1 and micro_batches % stages:
        raise ConfigError(
            f"layout.pp={stages} does not divide the {micro_batches} micro-batches of a step, as {chunks} chunks on "
            "every stage need it: change the global batch, micro_batch, or use 1 chunk"
        )


def layers_of(layers: int, stage: int, stages: int, chunks: int) -> tuple[range, ...]:
    """Which layers of the model each chunk of a stage has.

    Args:
        layers: of the model.
        stage: 0 <= stage < stages.
        stages, chunks: of the pipeline, and of each stage.

    Raises:
        ConfigError: the chunks do not divide the layers.
    """
    if layers % (stages * chunks):
        raise ConfigError(
            f"{layers} layers are not divided by layout.pp={stages} times {chunks} chunks: choose numbers whose "
            "product divides them"
        )
    size = layers // (stages * chunks)
    starts = [(chunk * stages + stage) * size for chunk in range(chunks)]
    return tuple(range(start, start + size) for start in starts)


def order(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """The units of a stage in the order of its work.

    Args:
        rank: the stage, 0 <= rank < stages.
        stages: of the pipeline, p.
        chunks: of each stage, v.
        micro_batches: of one iteration, m.

    Raises:
        ConfigError: see :func:`check_numbers`.
    """
    check_numbers(stages, chunks, micro_batches)
    first = warm_up_units(rank, stages, chunks, micro_batches)
    forward = _passes("forward", stages, chunks, micro_batches)
    backward = _passes("backward", stages, chunks, micro_batches)
    units = forward[:first]
    for pair in zip(forward[first:], backward, strict=False):  # the last backward units have no forward one left
        units += pair
    return units + backward[len(forward) - first :]


def forward_order(stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """The units of every stage when nothing is differentiated; the last round may lack micro-batches.

    Raises:
        ConfigError: a number is not positive, or one stage has several chunks.
    """
    check_numbers(stages, chunks, stages * micro_batches)
    return _passes("forward", stages, chunks, micro_batches)


def warm_up_units(rank: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Forward units of a stage before its first backward one, but for the one that comes right before it."""
    if chunks == 1:
        return min(stages - rank - 1, micro_batches)
    if micro_batches == stages:
        return micro_batches * chunks
    return min(2 * (stages - rank - 1) + (chunks - 1) * stages, micro_batches * chunks)


def most_in_flight(units: Sequence[Unit]) -> int:
    """How many forward passes a stage has at most whose backward pass is yet to come: what its memory must hold."""
    most = held = 0
    for unit in units:
        held += 1 if unit.direction == "forward" else -1
        most = max(most, held)
    return most


def slots(units: Sequence[Unit]) -> dict[tuple[int, int], int]:
    """Places of what forward passes leave to their backward passes, for each chunk and micro-batch.

    Of a chunk no two have the same place at the same time, and there are no more places than it has at once.
    """
    taken: dict[int, set[int]] = {}
    places: dict[tuple[int, int], int] = {}
    for direction, chunk, micro_batch in units:
        of_chunk = taken.setdefault(chunk, set())
        if direction == "backward":
            of_chunk.remove(places[chunk, micro_batch])
            continue
        place = next(number for number in itertools.count() if number not in of_chunk)
        of_chunk.add(place)
        places[chunk, micro_batch] = place
    return places


def slots_of_chunks(units: Sequence[Unit]) -> dict[int, int]:
    """How many places of :func:`slots` each chunk has."""
    counts: dict[int, int] = {}
    for (chunk, _), place in slots(units).items():
        counts[chunk] = max(counts.get(chunk, 0), place + 1)
    return counts


def follower(rank: int, stages: int, chunks: int, unit: Unit) -> tuple[int, Unit] | None:
    """The stage and unit that a unit's result is handed on to; None at either end of the model."""
    step = 1 if unit.direction == "forward" else -1
    part = unit.chunk * stages + rank + step
    if not 0 <= part < stages * chunks:
        return None
    chunk, stage = divmod(part, stages)
    return stage, Unit(unit.direction, chunk, unit.micro_batch)


def receives(rank: int, stages: int, chunks: int, unit: Unit) -> bool:
    """Whether a unit begins from what another stage has handed on."""
    against: Direction = "backward" if unit.direction == "forward" else "forward"
    return follower(rank, stages, chunks, Unit(against, unit.chunk, unit.micro_batch)) is not None


def _passes(direction: Direction, stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """All units of one direction: in each round of micro-batches chunk after chunk, backward the last one first."""
    places = range(chunks) if direction == "forward" else range(chunks - 1, -1, -1)
    return [
        Unit(direction, chunk, micro_batch)
        for first in range(0, micro_batches, stages)
        for chunk in places
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]
