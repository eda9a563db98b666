"""Evaluation points of logs against the rules' table of evaluation frequency.

The rules ask for evaluations at least as often as the reference has them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from common.mlperf.evaluation_points import check_evaluation_points
from common.mlperf.parsed_log import Event, ParsedLog
from common.mlperf.rules import rules_for


def log_of(
    global_batch: int, points: list[float], key: str = "eval_accuracy", progress: str = "epoch_num"
) -> ParsedLog:
    events = [Event(1, 0.0, "POINT_IN_TIME", "global_batch_size", global_batch, {})]
    events += [Event(2, 0.0, "POINT_IN_TIME", key, 0.1, {progress: point}) for point in points]
    return ParsedLog(Path("log"), tuple(events))


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "global_batch", "points"),
    [
        ("resnet", "4.0.0", 3264, [3, 7, 11]),
        ("retinanet", "5.1.0", 256, [1, 2, 3]),
        ("maskrcnn", "3.1.0", 64, [2, 3]),
        ("rnnt", "3.1.0", 2048, [1, 2]),
        # batch 56: 168 = 3 batches, S = 168: first after 1,000 epochs, then every 20.
        ("unet3d", "3.0.0", 56, [1000, 1020, 1040]),
        ("unet3d", "4.0.0", 56, [168000, 171360, 174720]),
        # batch 80: S = 240, first after ceil(1000 * 168 / 240) = 700 epochs, then every 14.
        ("unet3d", "4.0.0", 80, [168000, 171360]),
        # sample-counting logs round to batches in several ways: nothing is said of them
        ("bert", "5.0.0", 256, [1, 2]),
        # on several nodes the 20th evaluation of an epoch and that at its end round to one number
        ("rgat", "5.1.0", 73_728, [round(0.05 * n, 2) for n in range(1, 21)] + [1, 1.05, 1.1]),
        ("rgat", "5.1.0", 73_728, [round(0.05 * n, 2) for n in range(1, 20)] + [0.99, 1.0, 1.05]),
        # real samples where 150,528 are nominal, as in NVIDIA's log of 8 x H200: 1.99895 to a packed row
        ("bert", "5.0.0", 768, [150_369, 300_130, 449_812]),
        ("flux1", "6.1.0", 2304, [262_656, 525_312]),
        ("llama31_405b", "5.1.0", 1280, [16 * 19_200, 17 * 19_200]),  # floor(0.0026 * 1,280 + 12) = 15 are skipped
    ],
)
def test_points_of_the_rules_are_accepted(benchmark, ruleset, global_batch, points):
    rules = rules_for(benchmark, ruleset)
    assert check_evaluation_points(log_of(global_batch, points, progress=rules.progress_key), rules)[0] == []


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "global_batch", "points"),
    [
        # of a published result of v4.0
        ("resnet", "4.0.0", 1536, [3, 7, 11, 15, 19, 23, 27, 31, 33, 34, 35, 36]),
        ("retinanet", "5.1.0", 256, [1, 1.5, 2]),
        ("unet3d", "4.0.0", 56, [168_000, 168_168, 171_360]),
        ("bert", "5.0.0", 768, [150_528, 225_792, 300_288]),
        ("rgat", "5.1.0", 73_728, [0.05, 0.1, 0.12, 0.15]),
    ],
)
def test_more_evaluations_than_required_are_a_note(benchmark, ruleset, global_batch, points):
    rules = rules_for(benchmark, ruleset)
    refusals, notes = check_evaluation_points(log_of(global_batch, points, progress=rules.progress_key), rules)
    assert refusals == []
    assert "more evaluations than the rules' schedule" in notes[0]


def test_an_evaluation_that_several_ranks_log_is_not_an_additional_one():
    log = log_of(2048, [1, 1, 2, 2, 3, 3])
    assert check_evaluation_points(log, rules_for("rnnt", "3.1.0")) == ([], [])


def test_a_late_first_evaluation_is_a_note_with_both_points():
    # 0.05 * (230.23 * 768 + 3e6) = 158,840: every 150,000, of which none is skipped
    refusals, notes = check_evaluation_points(log_of(768, [300_288, 450_048]), rules_for("bert", "5.0.0"))
    assert refusals == []
    assert "after epoch_num 300288, and the first one of the rules' schedule is after 150000" in notes[0]


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "global_batch", "points"),
    [
        ("resnet", "4.0.0", 3264, [3, 8]),
        ("resnet", "4.0.0", 3264, [5, 9]),
        ("retinanet", "5.1.0", 256, [1, 3]),
        ("unet3d", "3.0.0", 56, [1020, 1040]),
        ("unet3d", "4.0.0", 56, [168000, 174720]),
        ("rgat", "5.1.0", 73_728, [0.05, 0.1, 0.2]),
        ("bert", "5.0.0", 768, [150_528, 301_056, 600_576]),
        ("llama2_70b_lora", "5.1.0", 128, [6912, 7680]),  # intervals of three batches, of which one is skipped
        ("gpt3", "4.1.0", 2048, [24_576 * 2048, 73_728 * 2048]),
        ("flux1", "6.1.0", 2304, [262_656, 787_968]),
        ("flux1", "6.1.0", 2304, [525_312, 787_968]),  # without the first
    ],
)
def test_a_missing_evaluation_is_refused(benchmark, ruleset, global_batch, points):
    rules = rules_for(benchmark, ruleset)
    (complaint,), _ = check_evaluation_points(log_of(global_batch, points, progress=rules.progress_key), rules)
    assert complaint.reason == "evaluation-schedule"
