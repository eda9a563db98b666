"""Order of work of a pipeline stage: a pure function of its rank and of the pipeline's sizes.

A stage holds one or several parts of the model, called chunks: with p stages and v chunks, chunk c of stage r is part
c p + r of the p v equal parts, so a micro-batch visits every stage v times. A *unit* of work is the forward or the
backward pass of one chunk on one micro-batch.

With one chunk this is 1F1B (Narayanan et al. 2021, section 2.2.1): p - r - 1 forward units, then alternating
directions. With several it is interleaved 1F1B (section 2.2.2 there, and Megatron-LM): first 2 (p - r - 1) + (v - 1)
p forward units, or all m v if the number of micro-batches m equals p, with micro-batches in rounds of p. Both leave
stages idle for (p - 1) / (v m) of the working time.

In both schedules a stage produces results in the order in which its neighbour consumes them, so a queue connects them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from common.errors import ConfigError

Direction = Literal["forward", "backward"]


class Unit(NamedTuple):
    """One pass of one chunk on one micro-batch.

    Attributes:
        chunk: index of the chunk within the stage, from 0.
        micro_batch: index of the micro-batch within the iteration, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int


def check_numbers(stages: int, chunks: int, micro_batches: int) -> None:
    """Check that a schedule exists for these sizes.

    Raises:
        ConfigError: a size is not positive, a single stage has several chunks, or there are several chunks and the
            number of micro-batches is not a multiple of the number of stages.
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
    """Return the layer indices of each chunk of a stage.

    Args:
        layers: number of layers of the model.
        stage: index of the stage, 0 <= stage < stages.
        chunks: number of chunks per stage.

    Raises:
        ConfigError: the number of layers is not a multiple of the total number of chunks.
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
    """Return the forward and backward units of a stage in execution order.

    The order is 1F1B for one chunk, and interleaved 1F1B for several.

    Args:
        rank: index of the stage, 0 <= rank < stages.
        stages: number of stages, p.
        chunks: number of chunks per stage, v.
        micro_batches: number of micro-batches per iteration, m.

    Raises:
        ConfigError: see :func:`check_numbers`.
    """
    check_numbers(stages, chunks, micro_batches)
    first = warm_up_units(rank, stages, chunks, micro_batches)
    forward = _passes("forward", stages, chunks, micro_batches)
    backward = _passes("backward", stages, chunks, micro_batches)
    units = forward[:first]
    for pair in zip(forward[first:], backward, strict=False):  # the last backward units have no partner
        units += pair
    return units + backward[len(forward) - first :]


def forward_order(stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """Return the forward units of a stage, in an order that is the same on all stages, without backward units.

    Any number of micro-batches is allowed: the last round may have fewer than ``stages``.

    Raises:
        ConfigError: a size is not positive, or a single stage has several chunks.
    """
    check_numbers(stages, chunks, stages * micro_batches)
    return _passes("forward", stages, chunks, micro_batches)


def warm_up_units(rank: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Return the number of forward units of a stage before it alternates forward and backward units.

    Args:
        rank: index of the stage, from 0.
        chunks: parts of the model on each stage.
        micro_batches: micro-batches of an iteration.
    """
    if chunks == 1:
        return min(stages - rank - 1, micro_batches)
    if micro_batches == stages:
        return micro_batches * chunks
    return min(2 * (stages - rank - 1) + (chunks - 1) * stages, micro_batches * chunks)


def most_in_flight(units: Sequence[Unit]) -> int:
    """Return the maximum number of forward passes that wait for their backward pass; they determine the memory."""
    most = held = 0
    for unit in units:
        held += 1 if unit.direction == "forward" else -1
        most = max(most, held)
    return most


def slots(units: Sequence[Unit]) -> dict[tuple[int, int], int]:
    """Return a buffer slot for the saved activations of each (chunk, micro-batch).

    Within a chunk, no two forward passes use the same slot at the same time, and the number of slots is minimal.
    """
    taken: dict[int, set[int]] = {}
    slot_of: dict[tuple[int, int], int] = {}
    for direction, chunk, micro_batch in units:
        of_chunk = taken.setdefault(chunk, set())
        if direction == "backward":
            of_chunk.remove(slot_of[chunk, micro_batch])
            continue
        slot = next(number for number in itertools.count() if number not in of_chunk)
        of_chunk.add(slot)
        slot_of[chunk, micro_batch] = slot
    return slot_of


def slots_of_chunks(units: Sequence[Unit]) -> dict[int, int]:
    """Return the number of slots of each chunk; see :func:`slots`."""
    counts: dict[int, int] = {}
    for (chunk, _), slot in slots(units).items():
        counts[chunk] = max(counts.get(chunk, 0), slot + 1)
    return counts


def follower(rank: int, stages: int, chunks: int, unit: Unit) -> tuple[int, Unit] | None:
    """Return the stage and unit that receive the result of ``unit``; None at either end of the model.

    Args:
        rank: index of the stage that computes ``unit``, from 0.
        chunks: parts of the model on each stage.
    """
    step = 1 if unit.direction == "forward" else -1
    part = unit.chunk * stages + rank + step
    if not 0 <= part < stages * chunks:
        return None
    chunk, stage = divmod(part, stages)
    return stage, Unit(unit.direction, chunk, unit.micro_batch)


def receives(rank: int, stages: int, chunks: int, unit: Unit) -> bool:
    """Return whether the input of ``unit`` comes from another stage."""
    against: Direction = "backward" if unit.direction == "forward" else "forward"
    return follower(rank, stages, chunks, Unit(against, unit.chunk, unit.micro_batch)) is not None


def _passes(direction: Direction, stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """Return all units of one direction: per round of micro-batches all chunks, in reverse order for backward."""
    order_of_chunks = range(chunks) if direction == "forward" else range(chunks - 1, -1, -1)
    return [
        Unit(direction, chunk, micro_batch)
        for first in range(0, micro_batches, stages)
        for chunk in order_of_chunks
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]
