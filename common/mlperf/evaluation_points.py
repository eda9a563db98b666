"""Checks whether the evaluations in a log are at the points that the rules require."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.progress import GPT3_SEQUENCE, checkpoint_scores, evaluations_of, first_passing, targets_of
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules
from common.mlperf.schedules import CRITEO_SAMPLES, SCHEDULES, Schedule


def _resnet(global_batch: int, first: int, rules: Rules) -> Schedule:
    return SCHEDULES["resnet"](global_batch, first_epoch=first)


def _every_epoch(global_batch: int, first: int, rules: Rules) -> Schedule:
    """Return a schedule of every epoch from the first evaluation on. Skipping early evaluations is allowed."""
    return Schedule(first, 1, None, "epoch")


def _every_generation(global_batch: int, first: int, rules: Rules) -> Schedule:
    """Return a schedule of every generation from the first evaluation on, which may have the number 0."""
    return Schedule(first + 1, 1, None, "generation", start=(first,))


def _unet3d(global_batch: int, first: int, rules: Rules) -> Schedule:
    """Return the schedule in epochs of whole batches, or in their samples if the ruleset counts samples."""
    schedule = SCHEDULES["unet3d"](global_batch)
    size = schedule.epoch_samples if rules.unit == "samples" else 1
    assert size is not None
    return Schedule(schedule.first * size, schedule.interval * size, None, "samples")


def _ssd300(global_batch: int, first: int, rules: Rules) -> Schedule | None:
    """Return the schedule of SSD300; None if a log may follow either of two schedules.

    v0.7: after epochs 40 and 50, then every 5 epochs. Later: every 5 epochs from the first evaluation on. The text of
    v1.0 still has the fixed epochs, but results of v1.1 evaluate every 5 epochs, so logs from epoch 40 on are
    ambiguous.

    Raises:
        ValueError: the first evaluation is not after a multiple of 5 epochs.
    """
    if rules.ruleset == "0.7.0":
        return replace(SCHEDULES["ssd300"](global_batch, ruleset=rules.ruleset), last=None)
    if first == 40:
        return None
    if first % 5:
        raise ValueError(f"SSD300 is evaluated every 5 epochs, and first after {first}")
    return Schedule(first, 5, None, "epoch")


OF_A_LOG: dict[str, Callable[[int, int, Rules], Schedule | None]] = {
    "resnet": _resnet,
    "ssd300": _ssd300,
    "retinanet": _every_epoch,
    "maskrcnn": _every_epoch,
    "rnnt": _every_epoch,
    "cosmoflow": _every_epoch,
    "minigo": _every_generation,
    "unet3d": _unet3d,
}
"""Benchmark -> function from global batch, first evaluation of a log and rules to the schedule; None if ambiguous.

Contains only benchmarks whose logs state evaluation points exactly. Logs that count samples round them to batches."""


def _sequences(global_batch: int, ruleset: str, benchmark: str) -> float:
    return SCHEDULES[benchmark](global_batch).interval


def _of_round(global_batch: int, ruleset: str, benchmark: str) -> float:
    return SCHEDULES[benchmark](global_batch, ruleset=ruleset).interval


def _tokens(global_batch: int, ruleset: str, benchmark: str) -> float:
    return GPT3_SEQUENCE * SCHEDULES[benchmark](global_batch).interval


def _part_of_criteo(global_batch: int, ruleset: str, benchmark: str) -> float:
    return SCHEDULES[benchmark](global_batch).interval / CRITEO_SAMPLES


def _twentieth(global_batch: int, ruleset: str, benchmark: str) -> float:
    return 0.05


FURTHEST = 1e18
"""Limit of plausible progress, in samples or tokens (about 2**60); larger values count as damage."""

GRIDS: dict[str, Callable[[int, str, str], float]] = {
    "bert": _of_round,
    "gpt3": _tokens,
    "llama2_70b_lora": _sequences,
    "llama31_405b": _of_round,
    "llama31_8b": _sequences,
    "gpt_oss_20b": _sequences,
    "flux1": _sequences,
    "openfold": _sequences,
    "dlrm_dcnv2": _part_of_criteo,
    "rgat": _twentieth,
}
"""Benchmark -> function from global batch, ruleset and benchmark to the evaluation interval in units of progress.

Logs of these benchmarks round each evaluation, or the interval, to whole batches, and may skip early evaluations,
except those of :data:`FROM_THE_FIRST`."""

FROM_THE_FIRST = frozenset({"flux1"})
"""Benchmarks whose rules name no early evaluation to skip, and whose published logs skip none."""


EVALUATIONS_AN_EPOCH = 20
"""Evaluations per epoch of R-GAT. Logs may have one more at the end of an epoch."""


def _off_grid(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Check that evaluations are one interval apart. The tolerance of the n-th point is n + 1 batches."""
    batch = log.global_batch
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1 or rules.ruleset == "0.7.0":
        return []
    try:
        interval = GRIDS[rules.benchmark](batch, rules.ruleset, rules.benchmark)
    except ValueError:
        return []
    if interval <= 0:
        return [_off(f"global_batch_size {batch} is more than an epoch: no evaluation of the rules fits into it")]
    unit = {"dlrm_dcnv2": 1 / CRITEO_SAMPLES, "gpt3": GPT3_SEQUENCE, "rgat": 1e-7}.get(rules.benchmark, 1)
    found = [e for e in evaluations_of(log, rules) if abs(e.progress) < FURTHEST]
    numbered = [(round(each.progress / interval), each) for each in found]
    numbered = [(number, each) for number, each in numbered if number > 0]  # extra early evaluations are allowed
    for number, each in numbered:
        point = each.progress
        if abs(point - number * interval) > (number + 1) * batch * unit:
            text = (
                f"line {each.line}: an evaluation after {rules.progress_key} {point:.10g} is not the rules' "
                f"schedule at a batch of {batch}: every {interval:.10g}, so after {number * interval:.10g}"
            )
            return [_off(text)]
    if rules.benchmark in FROM_THE_FIRST and numbered and numbered[0][0] > 1:
        first = numbered[0][1]
        text = (
            f"line {first.line}: the first evaluation is after {rules.progress_key} {first.progress:.10g}, and the "
            f"rules require one every {interval:.10g} from the start"
        )
        return [_off(text)]
    for (before, _), (after, each) in pairwise(numbered):
        # The rules list 1.0 for R-GAT. On several nodes its 20th evaluation comes before the end of the epoch, at 0.99
        # or 1.0 after rounding, and the reference evaluates at the end as well.
        ends_epoch = rules.benchmark == "rgat" and after == before and after % EVALUATIONS_AN_EPOCH == 0
        if after != before + 1 and not ends_epoch:
            text = (
                f"line {each.line}: the evaluation after {rules.progress_key} {each.progress:.10g} does not follow "
                f"the one before by the rules' interval, {interval:.10g}"
            )
            return [_off(text)]
    return []


def _off(sentence: str) -> Refusal:
    return Refusal("evaluation-schedule", sentence)


def misplaced_evaluations(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Return refusals for evaluation points off the rules' schedule; empty if all are right or cannot be judged."""
    if rules.benchmark in GRIDS:
        return _off_grid(log, rules)
    batch = log.value("train_batch_size") if rules.benchmark == "minigo" else log.global_batch
    if rules.benchmark not in OF_A_LOG or not isinstance(batch, int):
        return []
    evaluations = [each for each in evaluations_of(log, rules) if abs(each.progress) < FURTHEST]
    if not evaluations:
        return []
    points = [evaluation.progress for evaluation in evaluations]
    for evaluation in evaluations:
        if not evaluation.progress.is_integer():
            text = (
                f"line {evaluation.line}: evaluations after {_listed(points)}: {rules.progress_key} is a whole number"
            )
            return [_off(text)]
    try:
        schedule = OF_A_LOG[rules.benchmark](batch, int(points[0]), rules)
    except ValueError as error:
        return [_off(f"line {evaluations[0].line}: the first evaluation breaks the rules' schedule: {error}")]
    if schedule is None:
        return []
    wanted = [float(point) for point in islice(schedule.points(), len(points))]
    if points == wanted:
        return []
    first = next(each for each, point in zip(evaluations, wanted, strict=True) if each.progress != point)
    text = (
        f"line {first.line}: evaluations after {rules.progress_key} {_listed(points)} are not the rules' "
        f"schedule: from the first on every {schedule.interval}, {_listed(wanted)}"
    )
    return [_off(text)]


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


def _listed(points: list[float]) -> str:
    return ", ".join(f"{point:g}" for point in points)
