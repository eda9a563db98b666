"""How far training was: evaluations and blocks of a log, in the unit that the rules count progress in.

Published logs number blocks from 0, 1 or the samples of an epoch, in epochs, samples, tokens or steps, by their place
or index. :func:`blocks_of` reads all of these; of a log that fits none, such as one that gives lengths alone,
nothing is known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from common.mlperf.parsed_log import Evaluation, Event, ParsedLog, evaluation_of
from common.mlperf.rules import Rules

GPT3_SEQUENCE = 2048
"""Tokens of a sequence of GPT-3."""

OLD_RULESETS = frozenset({"0.7.0", "1.0.0", "1.1.0"})
"""Rounds whose published logs have blocks and evaluations that are an epoch apart."""

WITHOUT_BLOCKS = frozenset({"minigo"})
"""Benchmarks whose evaluations do not end blocks, beside those that are scored offline."""


@dataclass(frozen=True)
class Block:
    """One block of training.

    Attributes:
        start, stop: its events; None where the log has none.
        begin, end: what was trained before it and after it, in the unit of the evaluations.
    """

    start: Event | None
    stop: Event | None
    begin: float
    end: float


@dataclass(frozen=True)
class Blocks:
    """The blocks of a log whose numbers are understood, in order.

    Attributes:
        tolerance: by how much an evaluation may miss the end of a block: an epoch, or a batch.
    """

    blocks: tuple[Block, ...]
    tolerance: float

    def needed(self, progress: float) -> tuple[Block, ...]:
        """The blocks that are trained when training is at ``progress``."""
        return tuple(block for block in self.blocks if block.end <= progress + self.tolerance / 2)

    def misses(self, progress: float) -> bool:
        """Whether no block ends at ``progress``."""
        ends = [block.end for block in self.blocks]
        at = bisect_left(ends, progress)
        return all(abs(progress - end) > self.tolerance for end in ends[max(0, at - 1) : at + 1])


def evaluations_of(log: ParsedLog, rules: Rules) -> list[Evaluation]:
    """The evaluations that the rules count, in file order; progress is NaN where the log does not say it."""
    found = []
    for event in log.all(rules.quality_key):
        evaluation = evaluation_of(event, rules.progress_key)
        if evaluation is not None:
            found.append(evaluation)
    return found


def blocks_of(log: ParsedLog, rules: Rules) -> Blocks | None:
    """The blocks of a log in the unit of its evaluations; None if its numbers are of no known kind."""
    if rules.unit == "epoch fraction" or rules.scored_offline or rules.benchmark in WITHOUT_BLOCKS:
        return None
    points = [e.progress for e in evaluations_of(log, rules) if math.isfinite(e.progress)]
    pairs = list(_pairs(log))
    numbered = _by_epochs(pairs) or _by_place(pairs)
    if len(numbered) < 2 or not points:
        return None
    if any(after.begin <= before.begin or after.end <= before.end for before, after in pairwise(numbered)):
        return None
    counted = rules.unit in ("samples", "tokens")
    batch = float(log.global_batch) if isinstance(log.global_batch, int) and log.global_batch > 0 else 1.0
    scales = [1.0]
    if counted:
        scales += [scale for scale in (batch, float(GPT3_SEQUENCE)) if scale <= points[0]]
        scales += _step_of_indices(numbered, points)
    epochs = 1.0 if rules.ruleset in OLD_RULESETS else 0.5
    fits = [_scaled(numbered, scale, max(batch, scale) if counted else epochs) for scale in scales]
    return min(fits, key=lambda blocks: sum(blocks.misses(point) for point in points))


def _scaled(blocks: Sequence[Block], scale: float, tolerance: float) -> Blocks:
    found = tuple(Block(each.start, each.stop, scale * each.begin, scale * each.end) for each in blocks)
    return Blocks(found, tolerance)


def _pairs(log: ParsedLog) -> Iterator[tuple[Event | None, Event | None]]:
    """Start and stop of each block before the first ``run_stop``."""
    begun: Event | None = None
    for event in log.events:
        if event.key == "run_stop":
            break
        if event.key == "block_start":
            if begun is not None:
                yield begun, None
            begun = event
        elif event.key == "block_stop":
            yield begun, event
            begun = None
    if begun is not None:
        yield begun, None


def _by_epochs(pairs: Sequence[tuple[Event | None, Event | None]]) -> list[Block]:
    """Blocks with ``first_epoch_num`` and ``epoch_count``; some log no beginning of the first."""
    numbers = [_epochs(start) for start, _ in pairs]
    known = [each for each in numbers if each is not None]
    if not known or any(each is None for each in numbers[1:]):
        return []
    first, count = known[0]
    origin = first if numbers[0] is not None and first <= max(1.0, count) else 0.0
    blocks = []
    for (start, stop), each in zip(pairs, numbers, strict=True):
        begin, end = (0.0, first) if each is None else (each[0] - origin, each[0] + each[1] - origin)
        blocks.append(Block(start, stop, begin, end))
    return blocks


def _epochs(start: Event | None) -> tuple[float, float] | None:
    if start is None:
        return None
    first, count = start.metadata.get("first_epoch_num"), start.metadata.get("epoch_count")
    return (float(first), float(count)) if is_number(first) and is_number(count) else None


def _by_place(pairs: Sequence[tuple[Event | None, Event | None]]) -> list[Block]:
    """Blocks whose start and stop say how many samples were trained before and after them."""
    blocks = []
    for start, stop in pairs:
        begin, end = (None if event is None else event.metadata.get("samples_count") for event in (start, stop))
        if not is_number(begin):
            return []
        if is_number(end):
            blocks.append(Block(start, stop, float(begin), float(end)))
    return blocks if all(block.begin < block.end for block in blocks) else []


def _step_of_indices(blocks: Sequence[Block], points: Sequence[float]) -> Iterator[float]:
    """What a block stands for where blocks count themselves (0, 1, 2, ...) and evaluations come in equal steps."""
    steps = [after - before for before, after in pairwise(points)]
    by_index = all(block.end - block.begin == 1 for block in blocks) and points[0] > 1000
    if by_index and steps and min(steps) > 0 and max(steps) - min(steps) <= 0.01 * max(steps) < math.inf:
        yield steps[0]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of a log is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
