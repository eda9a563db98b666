"""One target or several: whether metrics meet them, messages, and the log."""

from __future__ import annotations

import math

import pytest

from common.config.loading import build
from common.config.schema import BenchmarkConfig, TargetConfig
from common.errors import ConfigError
from common.mlperf.events import RunEvents, logged_data_set
from common.mlperf.mllog import RunLog
from tests.command_line import logged

SETTINGS = {
    "name": "stable_diffusion", "description": "", "train_samples": 1, "eval_samples": 1, "data_set": "synthetic",
    "schedule": {}, "facts": {}, "log_keys": {},
}  # fmt: skip
BOTH = {"FID": {"value": 90.0, "direction": "lower"}, "CLIP": {"value": 0.15, "direction": "higher"}}


def benchmark(targets: object = BOTH) -> BenchmarkConfig:
    made: BenchmarkConfig = build(BenchmarkConfig, {**SETTINGS, "targets": targets}, "benchmark")
    return made


@pytest.mark.parametrize(
    ("fid", "clip", "reached"),
    [(90.0, 0.15, True), (90.1, 0.2, False), (50.0, 0.149, False), (math.nan, 0.2, False), (50.0, math.nan, False)],
)
def test_one_evaluation_has_to_meet_all_targets(fid, clip, reached):
    assert benchmark().reached({"FID": fid, "CLIP": clip, "eval_samples": 1}) is reached


def test_judged_metrics_are_in_the_order_of_the_targets():
    values = {"eval_samples": 1.0, "CLIP": 0.2, "loss": 3.0, "FID": 80.0}
    assert list(benchmark().judged(values).items()) == [("FID", 80.0), ("CLIP", 0.2)]


def test_an_evaluation_without_a_metric_is_an_error():
    with pytest.raises(ValueError, match="gives no CLIP: it has FID"):
        benchmark().reached({"FID": 80.0})


def test_targets_in_words():
    assert [str(target) for target in benchmark().targets.values()] == ["<= 90", ">= 0.15"]


@pytest.mark.parametrize(
    ("data_set", "logged_as"), [("synthetic", "stand-in"), ("custom", "custom"), ("laion-400m", "laion-400m")]
)
def test_logs_keep_their_value_for_synthetic_data(data_set, logged_as):
    assert logged_data_set(build(BenchmarkConfig, {**SETTINGS, "targets": BOTH, "data_set": data_set}, "")) == logged_as


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({}, "benchmark.targets: a benchmark has at least one metric with a target"),
        ({"FID": {"value": 90.0}}, r"benchmark.targets.FID.direction: missing"),
        ({"FID": {"value": 90.0, "direction": "up"}}, r"benchmark.targets.FID.direction=up: expected one of"),
        ({"FID": 90.0}, r"benchmark.targets.FID: expected a section of keys"),
    ],
)
def test_wrong_targets_are_refused(targets, message):
    with pytest.raises(ConfigError, match=message):
        benchmark(targets)


@pytest.mark.parametrize(
    ("values", "metadata"),
    [
        ({"accuracy": 0.7}, [{"samples_count": 32}]),
        ({"FID": 80.0, "CLIP": 0.2}, [{"samples_count": 32, "metric": name} for name in ("FID", "CLIP")]),
    ],
)
def test_the_log_has_a_line_for_each_of_several_metrics(values, metadata, tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        RunEvents(log, "samples_count").accuracy(values, 32, 1_700_000_000_000)
    lines = logged(tmp_path / "log")
    assert [line["value"] for line in lines] == list(values.values())
    assert [{k: v for k, v in line["metadata"].items() if k not in ("file", "lineno")} for line in lines] == metadata


def test_a_single_metric_has_a_single_target():
    assert TargetConfig(0.7, "higher").met(0.7)
    assert not TargetConfig(0.7, "lower").met(0.71)
