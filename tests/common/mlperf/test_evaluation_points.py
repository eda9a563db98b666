"""Evaluation points of logs against the rules' table of evaluation frequency."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.mlperf.evaluation_points import misplaced_evaluations
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
        ("bert", "5.0.0", 768, [300_130, 449_812]),
        ("flux1", "6.1.0", 2304, [262_656, 525_312]),
    ],
)
def test_points_of_the_rules_are_accepted(benchmark, ruleset, global_batch, points):
    rules = rules_for(benchmark, ruleset)
    assert misplaced_evaluations(log_of(global_batch, points, progress=rules.progress_key), rules) == []


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "global_batch", "points"),
    [
        ("resnet", "4.0.0", 3264, [3, 8]),
        ("resnet", "4.0.0", 3264, [5, 9]),
        ("retinanet", "5.1.0", 256, [1, 3]),
        ("rnnt", "3.1.0", 2048, [1, 2, 2]),
        ("unet3d", "3.0.0", 56, [980, 1000]),
        ("unet3d", "4.0.0", 56, [1000, 1020]),
        ("unet3d", "4.0.0", 56, [168000, 174720]),
        ("rgat", "5.1.0", 73_728, [0.05, 0.1, 0.1, 0.15]),  # twice within an epoch
        ("rgat", "5.1.0", 73_728, [0.05, 0.1, 0.2]),
        ("bert", "5.0.0", 768, [150_369, 297_000]),  # more than a batch for each interval away
        ("flux1", "6.1.0", 2304, [262_656, 787_968]),
        ("flux1", "6.1.0", 2304, [525_312, 787_968]),  # without the first
    ],
)
def test_other_points_are_named(benchmark, ruleset, global_batch, points):
    rules = rules_for(benchmark, ruleset)
    (complaint,) = misplaced_evaluations(log_of(global_batch, points, progress=rules.progress_key), rules)
    assert complaint.reason == "evaluation-schedule"
