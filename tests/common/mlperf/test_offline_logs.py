"""Logs of runs that are scored offline: which checkpoints they must report, and what they came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from handwritten_logs import END, POINT, START, Line, replaced, resnet_lines

from common.mlperf.evaluation_points import ReportedCheckpoints, reported_checkpoints
from common.mlperf.parsed_log import read_log
from common.mlperf.rcp import convergence_of
from common.mlperf.result_verdict import judge_together
from common.mlperf.rules import rules_for
from common.mlperf.verdict import judge

WriteLog = Callable[..., Path]
EVERY = 512_000
Scores = Sequence[tuple[int, float, float]]
PASSED_AT_4: Scores = ((1, 240.0, 0.06), (2, 160.0, 0.10), (3, 113.0, 0.16), (4, 85.0, 0.16))
KEYS = {
    "global_batch_size": 256, "gradient_accumulation_steps": 1, "opt_name": "adamw", "opt_adamw_beta_1": 0.9,
    "opt_adamw_beta_2": 0.999, "opt_adamw_epsilon": 1e-08, "opt_adamw_weight_decay": 0.01,
    "opt_base_learning_rate": 7.17e-05, "opt_learning_rate_warmup_steps": 1000,
}  # fmt: skip


def lines_of(scores: Scores, seed: int = 1, data_set: str = "laion-400m", target: object = None) -> list[Line]:
    """A run of six checkpoints, a minute each, that ends with the fourth; ``scores`` has number, FID and CLIP."""
    head = [
        line for line in replaced(resnet_lines(seed=seed), "submission_benchmark", "stable_diffusion") if line[4] < 3
    ]
    blocks: list[Line] = []
    for number in range(6):
        begun, ended = {"samples_count": EVERY * number}, {"samples_count": EVERY * (number + 1)}
        blocks += [(START, "block_start", None, begun, 61 + 60 * number)]
        blocks += [(END, "block_stop", None, ended, 121 + 60 * number)]
    return [
        *head,
        (POINT, "data_set", data_set, {}, 3),
        *([] if target is None else [(POINT, "quality_target", target, {}, 3)]),
        *((POINT, key, value, {}, 3) for key, value in KEYS.items()),
        (END, "init_stop", None, {}, 60),
        (START, "run_start", None, {}, 61),
        (POINT, "train_samples", 6_513_144, {}, 62),
        (POINT, "eval_samples", 30_000, {}, 62),
        *blocks,
        *(
            (POINT, "eval_accuracy", value, {"metric": metric, "samples_count": EVERY * number}, 9000)
            for number, fid, clip in scores
            for metric, value in (("FID", fid), ("CLIP", clip))
        ),
        (END, "run_stop", None, {"status": "success", "samples_count": 4 * EVERY}, 301),
    ]


def in_steps(lines: Sequence[Line]) -> list[Line]:
    """``lines`` with progress in steps, as v3.1 logs it."""

    def renamed(name: str, entry: object) -> tuple[str, object]:
        return ("step_num", entry // 256) if name == "samples_count" and isinstance(entry, int) else (name, entry)

    return [(*line[:3], dict(renamed(*item) for item in line[3].items()), line[4]) for line in lines]


@pytest.mark.parametrize(
    ("scores", "reported"),
    [
        (PASSED_AT_4, ReportedCheckpoints(4 * EVERY, before=True, all=True)),
        (PASSED_AT_4[2:], ReportedCheckpoints(4 * EVERY, before=True, all=False)),
        ((PASSED_AT_4[0], PASSED_AT_4[3]), ReportedCheckpoints(4 * EVERY, before=False, all=False)),
        (((1, 80.0, 0.2), (2, 70.0, 0.2)), ReportedCheckpoints(EVERY, before=True, all=True)),
        (PASSED_AT_4[:3], None),
    ],
)
def test_scored_checkpoints_of_a_log(scores, reported, write_log):
    log = read_log(write_log(lines_of(scores)))
    rules = rules_for("stable_diffusion", "5.0.0")
    assert reported_checkpoints(log, rules) == reported
    assert convergence_of(log, rules) == (None if reported is None else reported.passed)


def test_a_checkpoint_of_any_size_is_compared_in_little_memory(write_log):
    last = 2**53 - 1
    at = {EVERY * 3: last - EVERY, EVERY * 4: last}
    lines = [
        (kind, key, value, {**metadata, "samples_count": at.get(metadata["samples_count"], 0)}, second)
        if "samples_count" in metadata
        else (kind, key, value, metadata, second)
        for kind, key, value, metadata, second in lines_of(PASSED_AT_4[2:])
    ]
    found = reported_checkpoints(read_log(write_log(lines)), rules_for("stable_diffusion", "5.0.0"))
    assert found == ReportedCheckpoints(last, before=True, all=False)


def test_the_published_interval_may_be_rounded_down(write_log):
    """888 steps of 576 images, where the rules' table rounds up to 889."""
    lines = [
        (kind, key, value, {**metadata, "samples_count": metadata["samples_count"] // EVERY * 511_488}, second)
        if "samples_count" in metadata
        else (kind, key, value, metadata, second)
        for kind, key, value, metadata, second in replaced(lines_of(PASSED_AT_4), "global_batch_size", 576)
    ]
    log = read_log(write_log(lines))
    found = reported_checkpoints(log, rules_for("stable_diffusion", "5.0.0"))
    assert found == ReportedCheckpoints(4 * 511_488, before=True, all=True)


def test_the_checkpoint_before_the_first_that_passes_belongs_to_a_valid_run(write_log):
    assert judge(write_log(lines_of(PASSED_AT_4[2:]))).kind == "valid run"
    verdict = judge(write_log(lines_of((PASSED_AT_4[0], PASSED_AT_4[3])), "without.txt"))
    assert verdict.kind == "refused"
    (reason,) = verdict.reasons
    assert "the checkpoint before the first that meets the targets, at samples_count 2048000, is not reported" in reason


def test_blocks_of_an_evaluation_have_the_time_of_its_checkpoint(write_log):
    """Published logs of v3.1 evaluate after the training, with the times of the checkpoints, in blocks of 10 steps."""
    lines = lines_of(PASSED_AT_4[2:])
    first = next(number for number, line in enumerate(lines) if line[1] == "eval_accuracy")
    block = {"samples_count": 0, "first_epoch_num": 3, "epoch_count": 4}
    evaluation: list[Line] = [
        (START, "eval_start", 0, {"samples_count": 3 * EVERY}, 241),
        (START, "block_start", "validation_step", block, 241),
        (END, "block_stop", "validation_step", block, 241),
        (END, "eval_stop", 0, {"samples_count": 3 * EVERY}, 241),
    ]
    assert judge(write_log([*lines[:first], *evaluation, *lines[first:]])).kind == "valid run"
    alone = judge(write_log([*lines[:first], *evaluation[1:3], *lines[first:]]))
    assert any("the clock goes back" in reason for reason in alone.reasons)


def test_run_stop_before_the_training_of_the_checkpoint_is_refused(write_log):
    lines = [*lines_of(PASSED_AT_4)[:-1], (END, "run_stop", None, {"status": "success"}, 241)]
    (reason,) = judge(write_log(lines)).reasons
    assert "which ended the training of the checkpoint at samples_count 2.048e+06" in reason


def test_an_evaluation_without_an_end_hides_no_early_run_stop(write_log):
    lines = [*lines_of(PASSED_AT_4)[:-1], (END, "run_stop", None, {"status": "success"}, 241)]
    at = next(number for number, line in enumerate(lines) if line[1] == "run_start") + 1
    begin: Line = (START, "eval_start", 0, {"samples_count": EVERY}, lines[at - 1][4])
    reasons = judge(write_log([*lines[:at], begin, *lines[at:]])).reasons
    assert any("which ended the training of the checkpoint at samples_count 2.048e+06" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("first", "ruleset", "kind"),
    [
        (PASSED_AT_4, "5.0.0", "submittable"),
        (PASSED_AT_4, "4.1.0", "submittable"),
        (PASSED_AT_4[2:], "3.1.0", "refused"),
    ],
)
def test_one_run_of_a_result_reports_all_checkpoints(first, ruleset, kind, write_log):
    every = [first, *[PASSED_AT_4[2:]] * 9]
    as_logged = in_steps if ruleset == "3.1.0" else list
    paths = [write_log(as_logged(lines_of(scores, seed=100 + n)), f"result_{n}.txt") for n, scores in enumerate(every)]
    verdict = judge_together([judge(path, ruleset) for path in paths], ruleset)
    assert verdict.kind == kind, verdict.reasons
    if kind == "refused":
        (reason,) = verdict.reasons
        assert "no run reports all checkpoints up to the first that meets the targets" in reason
    elif ruleset == "5.0.0":  # slower than the reference, whose mean is 1,706,667 samples
        assert verdict.score == pytest.approx(4.0)


@pytest.mark.parametrize("ruleset", ["4.1.0", "5.0.0"])
def test_later_rounds_accept_results_without_a_run_that_reports_all_checkpoints(write_log, ruleset):
    """None of the published results of these rounds that we know has such a run."""
    paths = [write_log(lines_of(PASSED_AT_4[2:], seed=100 + n), f"result_{n}.txt") for n in range(10)]
    verdict = judge_together([judge(path, ruleset) for path in paths], ruleset)
    assert verdict.kind == "submittable", verdict.reasons
    assert any("no run reports all checkpoints" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("target", "passed"), [({"FID": 200.0, "CLIP": 0.05}, 2 * EVERY), ({"FID": 1.0, "CLIP": 0.05}, None), (None, None)]
)
def test_synthetic_data_have_the_targets_in_their_log(target, passed, write_log):
    lines = lines_of(PASSED_AT_4, data_set="stand-in", target=target)
    log = read_log(write_log([*lines[:-1], (END, "run_stop", None, {"status": "success"}, 181)]))
    assert convergence_of(log, rules_for("stable_diffusion", "5.0.0")) == passed
    verdict = judge(log.path)
    assert verdict.kind == "format", verdict.reasons
