"""Checks whether a log has at least the evaluations that the rules require."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.progress import GPT3_SEQUENCE, checkpoint_scores, evaluations_of, first_passing, targets_of
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules
from common.mlperf.schedules import CRITEO_SAMPLES, IGBH_SEEDS, SCHEDULES, Schedule


def _epochs(global_batch: int, rules: Rules) -> Schedule:
    """Return the schedule of a benchmark whose logs count epochs or generations."""
    return SCHEDULES[rules.benchmark](global_batch)


def _resnet(global_batch: int, rules: Rules) -> Schedule:
    """Return the schedule with the latest first evaluation that the rules allow, after epoch 4."""
    return SCHEDULES["resnet"](global_batch, first_epoch=4)


def _unet3d(global_batch: int, rules: Rules) -> Schedule:
    """Return the schedule in epochs of whole batches, or in their samples if the ruleset counts samples."""
    schedule = SCHEDULES["unet3d"](global_batch)
    size = schedule.epoch_samples if rules.unit == "samples" else 1
    assert size is not None
    return Schedule(schedule.first * size, schedule.interval * size, None, "samples")


def _ssd300(global_batch: int, rules: Rules) -> Schedule:
    """Return the schedule after epochs 40 and 50, and then every 5 epochs; after v1.0, every 5 epochs.

    The text of v1.0 has the fixed epochs of v0.7, but results of v1.1 evaluate every 5 epochs.
    """
    fixed = rules.ruleset in ("0.7.0", "1.0.0")
    return replace(SCHEDULES["ssd300"](global_batch, ruleset="0.7.0" if fixed else rules.ruleset), last=None)


def _samples(global_batch: int, rules: Rules) -> Schedule:
    """Return the schedule in samples, or in tokens for GPT-3."""
    schedule = SCHEDULES[rules.benchmark](global_batch)
    scale = GPT3_SEQUENCE if rules.unit == "tokens" else 1
    return replace(schedule, first=scale * schedule.first, interval=scale * schedule.interval)


def _of_round(global_batch: int, rules: Rules) -> Schedule:
    """Return the schedule in samples of a benchmark whose interval depends on the ruleset."""
    return SCHEDULES[rules.benchmark](global_batch, ruleset=rules.ruleset)


EXACT: dict[str, Callable[[int, Rules], Schedule]] = {
    "resnet": _resnet,
    "ssd300": _ssd300,
    "retinanet": _epochs,
    "maskrcnn": _epochs,
    "rnnt": _epochs,
    "cosmoflow": _epochs,
    "minigo": _epochs,
    "unet3d": _unet3d,
}
"""Benchmark -> function from global batch and rules to the schedule. Logs state these evaluation points exactly."""

ROUNDED: dict[str, Callable[[int, Rules], Schedule]] = {
    "bert": _of_round,
    "gpt3": _samples,
    "llama2_70b_lora": _samples,
    "llama31_405b": _of_round,
    "llama31_8b": _samples,
    "gpt_oss_20b": _samples,
    "flux1": _samples,
    "openfold": _samples,
    "dlrm_dcnv2": _samples,
    "rgat": _samples,
}
"""Benchmark -> function as in EXACT. Logs round these evaluation points, or the interval, to whole batches."""

FIRST_REQUIRED = frozenset({"resnet", "unet3d", "flux1"})
"""Benchmarks whose first evaluation has a latest point. In other logs, a late first evaluation is only a note."""

FURTHEST = 1e18
"""Limit of plausible progress, in samples or tokens (about 2**60); larger values count as damage."""

ROUNDING_BATCHES = 3
"""Tolerance of a distance in ROUNDED, in global batches. Packed samples of published BERT logs need up to 1.7."""

EPOCH_FRACTIONS = {"dlrm_dcnv2": CRITEO_SAMPLES, "rgat": IGBH_SEEDS}
"""Benchmarks whose logs state fractions of an epoch -> samples in an epoch."""


@dataclass(frozen=True)
class _Limits:
    """Longest training between two evaluations of a log, in units of its progress.

    Attributes:
        schedule: the schedule of the rules, in ``1 / scale`` units.
        tolerance: rounding that is allowed in the log.
    """

    schedule: Schedule
    scale: float
    tolerance: float

    def latest(self, before: float) -> float:
        """Return the latest point of the evaluation that follows an evaluation at ``before``, without tolerance."""
        following = [each / self.scale for each in (*self.schedule.start, self.schedule.first)]
        return max(before + self.interval, next((point for point in following if point > before), 0.0))

    @property
    def first(self) -> float:
        """First evaluation point of the rules."""
        return min(self.schedule.start, default=self.schedule.first) / self.scale

    @property
    def interval(self) -> float:
        """Distance between two evaluation points of the rules."""
        return self.schedule.interval / self.scale


def _limits(batch: int, rules: Rules) -> _Limits | None:
    """Return the limits of a log; None if the rules have no schedule, or only one that cannot be compared with logs.

    Raises:
        ValueError: the global batch is larger than the interval, or than an epoch.
    """
    if rules.benchmark in EXACT:
        return _Limits(EXACT[rules.benchmark](batch, rules), 1.0, 0.0)
    if rules.benchmark not in ROUNDED or rules.ruleset == "0.7.0":
        return None
    schedule = ROUNDED[rules.benchmark](batch, rules)
    scale = EPOCH_FRACTIONS.get(rules.benchmark, 1)
    rounded = ROUNDING_BATCHES * batch * (GPT3_SEQUENCE if rules.unit == "tokens" else 1)
    # R-GAT: labels have two decimals, and the remaining batches of an epoch follow its last evaluation.
    label = 0.02 if rules.benchmark == "rgat" else 0.0
    return _Limits(schedule, scale, min(max(rounded / scale, label), schedule.interval / scale / 2))


def check_evaluation_points(log: ParsedLog, rules: Rules) -> tuple[list[Refusal], list[str]]:
    """Return refusals and notes on the evaluation points of a log; both empty if the log cannot be judged.

    The rules require evaluations at least as often as the reference has them. So a log with a longer distance between
    two evaluations than the schedule is refused, and additional evaluations are only a note.
    """
    batch = log.value("train_batch_size") if rules.benchmark == "minigo" else log.global_batch
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        return [], []
    evaluations = [each for each in evaluations_of(log, rules) if abs(each.progress) < FURTHEST]
    try:
        limits = _limits(batch, rules)
    except ValueError as error:
        text = f"global_batch_size {batch} does not fit the evaluation schedule of {rules.log_name}: {error}"
        return [Refusal("evaluation-schedule", text)], []
    if limits is None or not evaluations:
        return [], []
    key, first = rules.progress_key, evaluations[0]
    notes: list[str] = []
    if first.progress > limits.first + limits.tolerance:
        text = (
            f"line {first.line}: the first evaluation is after {key} {first.progress:.10g}, and the first one of the "
            f"rules' schedule is after {limits.first:.10g}"
        )
        if rules.benchmark in FIRST_REQUIRED:
            return [Refusal("evaluation-schedule", text)], []
        if not rules.scored_offline:  # MiniGo counts generations from any number
            notes.append(text)
    for before, after in pairwise(evaluations):
        latest = limits.latest(before.progress)
        if after.progress > latest + limits.tolerance:
            text = (
                f"line {after.line}: no evaluation between {key} {before.progress:.10g} and {after.progress:.10g}: at "
                f"a batch of {batch} the rules' schedule has one every {limits.interval:.10g}, so after "
                f"{latest:.10g} at the latest"
            )
            return [Refusal("evaluation-schedule", text)], notes
    close = [
        after
        for before, after in pairwise(evaluations)
        if before.progress >= limits.first and 0 < after.progress - before.progress < limits.interval - limits.tolerance
    ]
    if close:
        notes.append(
            f"line {close[0].line}: the log has more evaluations than the rules' schedule, which has one every "
            f"{limits.interval:.10g} ({key}): the rules allow this"
        )
    return [], notes


@dataclass(frozen=True)
class ReportedCheckpoints:
    """Coverage of the checkpoints up to the first that meets the targets, in a log that is scored offline.

    Attributes:
        passed: progress of the first checkpoint that meets the targets.
        before: whether the checkpoint before it is reported, or there is none.
        all: whether all checkpoints before it are reported.
    """

    passed: float
    before: bool
    all: bool


def reported_checkpoints(log: ParsedLog, rules: Rules) -> ReportedCheckpoints | None:
    """Return which checkpoints a log reports; None if no checkpoint meets the targets or the batch is unknown.

    Checkpoints are numbered by rounding, because published logs round the interval to whole batches, up or down.
    """
    batch, scores = log.global_batch, checkpoint_scores(log, rules)
    passed = first_passing(scores, targets_of(log, rules))
    if passed is None or not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        return None
    interval = SCHEDULES[rules.benchmark](batch).interval / (batch if rules.unit == "steps" else 1)
    number = max(1, round(passed / interval))
    found = {round(at / interval) for at in scores if at < passed}
    every = sum(1 <= each < number for each in found) == number - 1
    return ReportedCheckpoints(passed, number == 1 or number - 1 in found, every)
