"""All metrics of an evaluation in one event, as the rules of Mask R-CNN require."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from common.data.batches import Block
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.rules import BENCHMARKS, rules_for
from common.mlperf.verdict import judge
from tests.command_line import logged, official_exit_code

SETTINGS = {
    "global_batch_size": 96,
    "gradient_accumulation_steps": 1,
    "opt_name": "sgd_with_momentum",
    "opt_base_learning_rate": 0.12,
    "opt_learning_rate_warmup_steps": 625,
    "opt_learning_rate_warmup_factor": 1.92e-4,
    "opt_learning_rate_decay_factor": 0.1,
    "opt_learning_rate_decay_steps": [12000, 16000],
    "num_image_candidates": 12000,
    "min_image_size": 800,
    "max_image_size": 1333,
}
PASSING = {"BBOX": 0.3779, "SEGM": 0.3412}
PICTURES = 117266


def write_log(path: Path, last: dict[str, float], together: bool = True, status: str = "success") -> Path:
    """Write the log of a run of two epochs, whose second evaluation has the metrics ``last``."""
    rules = rules_for("maskrcnn")
    minute = 60_000
    begun = time.time_ns() // 1_000_000 - 60 * minute
    with RunLog(path, 0) as log:
        for key, value in {
            "cache_clear": True,
            "submission_benchmark": "maskrcnn",
            "submission_org": "acme",
            "submission_division": "closed",
            "submission_status": "onprem",
            "submission_platform": "8xH100",
        }.items():
            log.event(key, value, time_ms=begun)
        log.start("init_start", time_ms=begun)
        for key, value in {"seed": 1, **SETTINGS}.items():
            log.event(key, value, time_ms=begun)
        log.end("init_stop", time_ms=begun + minute)
        log.start("run_start", time_ms=begun + minute)
        log.event("train_samples", PICTURES, time_ms=begun + minute)
        log.event("eval_samples", 5000, time_ms=begun + minute)
        events = RunEvents(log, rules.progress_key, quality_key=rules.quality_key, quality_together=together)
        for epoch, values in ((1, {"BBOX": 0.1, "SEGM": 0.09}), (2, last)):
            at = begun + 10 * epoch * minute
            block = Block(epoch - 1, epoch, 1, (epoch - 1) * PICTURES, PICTURES)
            events.block_start(block, block.start_sample, at)
            events.epoch_start(epoch, at)
            events.epoch_stop(epoch, 1400.0, at + 5 * minute)
            events.block_stop(block, epoch * PICTURES, 1400.0, at + 5 * minute)
            events.eval_start(epoch, at + 5 * minute)
            events.accuracy(values, epoch, at + 6 * minute)
            events.eval_stop(epoch, at + 6 * minute)
        events.run_stop(status, 2, at + 6 * minute)
    return path


def test_an_evaluation_is_one_line_with_both_metrics_and_its_epoch(tmp_path):
    first, last = logged(write_log(tmp_path / "log", PASSING), "eval_accuracy")
    assert last["value"] == PASSING
    assert last["metadata"]["epoch_num"] == 2
    assert "metric" not in last["metadata"]
    assert first["metadata"]["epoch_num"] == 1


def test_the_official_checker_and_ours_accept_it_as_a_converged_run(tmp_path):
    path = write_log(tmp_path / "log", PASSING)
    assert official_exit_code(path, "3.1.0") == 0
    verdict = judge(path)
    assert (verdict.kind, verdict.reasons) == ("valid run", ())
    assert verdict.converged


def test_the_official_checker_refuses_one_line_per_metric(tmp_path):
    path = write_log(tmp_path / "log", PASSING, together=False)
    assert len(logged(path, "eval_accuracy")) == 4
    assert official_exit_code(path, "3.1.0") != 0


@pytest.mark.parametrize("last", [{"BBOX": 0.376, "SEGM": 0.35}, {"BBOX": 0.38, "SEGM": 0.338}])
def test_one_metric_below_its_target_is_no_success(last, tmp_path):
    assert not judge(write_log(tmp_path / "log", last)).converged


def test_nan_is_logged_and_misses_the_target(tmp_path):
    path = write_log(tmp_path / "log", {"BBOX": math.nan, "SEGM": 0.35}, status="aborted")
    assert math.isnan(logged(path, "eval_accuracy")[1]["value"]["BBOX"])
    assert not judge(path).converged


def test_only_mask_rcnn_has_them_together():
    assert [name for name in BENCHMARKS if rules_for(name).quality_together] == ["maskrcnn"]
