"""Training progress in a log: evaluations and blocks, in the unit in which the rules count progress.

No rule defines the labels of blocks. Published logs label a block by its first epoch (from 0, from 1 or from the
samples of an epoch), by its end, by its index or by other counts, in epochs, samples, tokens or steps.
:func:`blocks_of` tries the known schemes and accepts one only if the log confirms it: at least twice as many
evaluations are at ends of blocks as elsewhere. Labels of other logs are not interpreted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeGuard

from common.mlperf.parsed_log import Event, LoggedEvaluation, ParsedLog, evaluation_of, is_number
from common.mlperf.rules import QualityTarget, Rules, all_met

GPT3_SEQUENCE = 2048
"""Tokens per sequence of GPT-3."""

OLD_RULESETS = frozenset({"0.7.0", "1.0.0", "1.1.0"})
"""Rulesets whose published logs have blocks and evaluations that are one epoch apart."""

CONFIRMING_RATIO = 2
"""Smallest ratio of evaluations at ends of blocks to other evaluations that confirms a reading of the labels."""


@dataclass(frozen=True)
class LoggedBlock:
    """One block of training.

    Attributes:
        start, stop: events of the block; None if the log lacks the event.
        begin, end: progress before and after the block, in the unit of the evaluations.
    """

    start: Event | None
    stop: Event | None
    begin: float
    end: float


@dataclass(frozen=True)
class Blocks:
    """Blocks of a log whose labels could be interpreted, in order.

    Attributes:
        tolerance: largest distance between an evaluation and the end of its block: an epoch or a batch.
    """

    blocks: tuple[LoggedBlock, ...]
    tolerance: float

    def needed(self, progress: float) -> tuple[LoggedBlock, ...]:
        """Return the blocks that end at most half of ``tolerance`` after ``progress``."""
        return tuple(block for block in self.blocks if block.end <= progress + self.tolerance / 2)

    def misses(self, progress: float) -> bool:
        """Return whether no block ends within ``tolerance`` of ``progress``."""
        ends = [block.end for block in self.blocks]
        at = bisect_left(ends, progress)
        return all(abs(progress - end) > self.tolerance for end in ends[max(0, at - 1) : at + 1])


def evaluations_of(log: ParsedLog, rules: Rules) -> list[LoggedEvaluation]:
    """Return the evaluations that the rules count, in file order. The progress is NaN if the log does not state it."""
    found = (evaluation_of(event, rules.progress_key) for event in log.all(rules.quality_key))
    return [evaluation for evaluation in found if evaluation is not None]


def blocks_of(log: ParsedLog, rules: Rules) -> Blocks | None:
    """Return the blocks of a log in the unit of its evaluations; None if the labels cannot be interpreted."""
    if rules.unit == "epoch fraction" or rules.scored_offline:
        return None
    points = [e.progress for e in evaluations_of(log, rules) if math.isfinite(e.progress)]
    counted = rules.unit in ("samples", "tokens")
    batch = float(log.global_batch) if isinstance(log.global_batch, int) and log.global_batch > 0 else 1.0
    epochs = 1.0 if rules.ruleset in OLD_RULESETS else 0.5
    best, hits = None, 0
    for numbered in _numberings(list(block_pairs(log))):
        scales = [1.0]
        if counted and points:
            scales += [scale for scale in (batch, float(GPT3_SEQUENCE)) if scale <= points[0]]
            scales += _step_of_indices(numbered, points)
        for scale in scales:
            blocks = _scaled(numbered, scale, max(batch, scale) if counted else epochs)
            found = sum(not blocks.misses(point) for point in points)
            if found > hits:
                best, hits = blocks, found
    return best if hits >= CONFIRMING_RATIO * (len(points) - hits) else None


def _numberings(pairs: Sequence[tuple[Event | None, Event | None]]) -> Iterator[list[LoggedBlock]]:
    """Yield every interpretation of the labels in which the blocks follow each other."""
    for numbered in (_by_position(pairs), *(_by_epochs(pairs, origin) for origin in _origins(pairs))):
        ascending = all(a.begin < b.begin and a.end < b.end for a, b in pairwise(numbered))
        if len(numbered) > 1 and ascending:
            yield numbered


def _scaled(blocks: Sequence[LoggedBlock], scale: float, tolerance: float) -> Blocks:
    found = tuple(LoggedBlock(each.start, each.stop, scale * each.begin, scale * each.end) for each in blocks)
    return Blocks(found, tolerance)


def block_pairs(log: ParsedLog) -> Iterator[tuple[Event | None, Event | None]]:
    """Yield start and stop of each block before the first ``run_stop``; None in place of a missing event."""
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


def _origins(pairs: Sequence[tuple[Event | None, Event | None]]) -> list[float]:
    """Return the numbers that the first epoch may have: 0, 1, or the first label if the log begins with it."""
    first = next((found for start, _ in pairs if (found := _epochs(start)) is not None), None)
    if first is None:
        return []
    at_start = pairs[0][0] is not None and first[0] <= max(1.0, first[1])
    return list(dict.fromkeys([*([first[0]] if at_start else []), 0.0, 1.0]))


def _by_epochs(pairs: Sequence[tuple[Event | None, Event | None]], origin: float) -> list[LoggedBlock]:
    """Return blocks from ``first_epoch_num`` and ``epoch_count``. Only the first block may lack its start."""
    blocks = []
    for number, (start, stop) in enumerate(pairs):
        labels = _epochs(start)
        if labels is not None:
            blocks.append(LoggedBlock(start, stop, labels[0] - origin, labels[0] + labels[1] - origin))
        elif number == 0 and len(pairs) > 1 and (after := _epochs(pairs[1][0])) is not None:
            blocks.append(LoggedBlock(start, stop, 0.0, after[0] - origin))
        else:
            return []
    return blocks


def _epochs(start: Event | None) -> tuple[float, float] | None:
    if start is None:
        return None
    first, count = start.metadata.get("first_epoch_num"), start.metadata.get("epoch_count")
    return (float(first), float(count)) if is_finite(first) and is_finite(count) else None


def _by_position(pairs: Sequence[tuple[Event | None, Event | None]]) -> list[LoggedBlock]:
    """Return blocks whose start and stop state the samples trained before and after them."""
    if not pairs:
        return []
    blocks = []
    labels = [[None if event is None else event.metadata.get("samples_count") for event in pair] for pair in pairs]
    following = [*(begin for begin, _ in labels[1:]), None]
    for (start, stop), (begin, end), after in zip(pairs, labels, following, strict=True):
        if not is_finite(begin):
            return []
        end = after if stop is None else end  # a block without a stop ends where the next one starts
        if is_finite(end):
            blocks.append(LoggedBlock(start, stop, float(begin), float(end)))
    return blocks if all(block.begin < block.end for block in blocks) else []


def _step_of_indices(blocks: Sequence[LoggedBlock], points: Sequence[float]) -> Iterator[float]:
    """Yield the length of a block if the labels are indices (0, 1, 2, ...) and the evaluations are equally spaced."""
    steps = [after - before for before, after in pairwise(points)]
    by_index = all(block.end - block.begin == 1 for block in blocks) and points[0] > 1000
    if by_index and steps and min(steps) > 0 and max(steps) - min(steps) <= 0.01 * max(steps) < math.inf:
        yield steps[0]


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a log is a finite number and not a bool."""
    return is_number(value) and math.isfinite(value)


def targets_of(log: ParsedLog, rules: Rules) -> tuple[QualityTarget, ...]:
    """Return the targets of the rules, or those that the log states if it uses other data. Empty if it states none."""
    targets = rules.targets_at(log.global_batch if isinstance(log.global_batch, int) else 0)
    if not log.other_data:
        return targets
    own = log.value("quality_target")
    values = own if isinstance(own, Mapping) else {targets[0].metric: own} if len(targets) == 1 else {}
    if all(is_finite(values.get(target.metric)) for target in targets):
        return tuple(QualityTarget(float(values[target.metric]), target.direction, target.metric) for target in targets)
    return ()


def implausible_notes(log: ParsedLog, rules: Rules, broken: Sequence[str]) -> list[str]:
    """Return a note if a log with other data fails the rule files only because its quality exceeds their upper bound.

    Args:
        broken: sentences on the targets of the rule files that the log misses.
    """
    batch = log.global_batch if isinstance(log.global_batch, int) else 0
    unbounded = [replace(target, bound=None) for target in rules.targets_at(batch)]
    if log.status != "success" or not broken or first_passing(checkpoint_scores(log, rules), unbounded) is None:
        return []
    return [f"the quality is too good for the rules, and the compliance checker refuses this log: {broken[0]}"]


def checkpoint_scores(log: ParsedLog, rules: Rules) -> dict[float, dict[str, float]]:
    """Map the progress of each checkpoint that was evaluated before the first ``run_stop`` to its metrics.

    Lines of the same checkpoint are merged. Evaluations without a finite progress are left out.
    """
    stop = next(iter(log.all("run_stop")), None)
    scores: dict[float, dict[str, float]] = {}
    for point in evaluations_of(log, rules):
        if math.isfinite(point.progress) and (stop is None or point.line < stop.line):
            scores.setdefault(point.progress, {}).update(point.values)
    return scores


def first_passing(scores: Mapping[float, Mapping[str, float]], targets: Sequence[QualityTarget]) -> float | None:
    """Return the progress of the first checkpoint that meets all targets; None without such a checkpoint or targets."""
    return min((at for at, found in scores.items() if targets and all_met(targets, found)), default=None)
