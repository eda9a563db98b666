"""The text and the picture at the end of a run."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.schema import BenchmarkConfig, TargetConfig
from common.observe.summary import Outcome, Summary, write_summary

OUTCOME = Outcome(
    status="success",
    ruleset="4.0.0",
    seed=42,
    resumed=False,
    seconds=740.7,
    samples=2_047_591,
    steps=2000,
    overflows=0,
    losses=[(sample, 7.0 - sample / 500) for sample in range(0, 2000, 10)],
    history=[(1000, {"eval_accuracy": 0.5}), (2000, {"eval_accuracy": 0.7601})],
    evaluations=2,
    evaluation_seconds=1.5,
    hidden_seconds=0.0,
    energy_joules=None,
    log=Path("/runs/result_0.txt"),
    output_dir=Path("/runs"),
)
BENCHMARK = BenchmarkConfig(
    name="resnet",
    description="ResNet-50",
    targets={"eval_accuracy": TargetConfig(0.759, "higher")},
    train_samples=1_281_167,
    eval_samples=50_000,
    data_set="ILSVRC2012",
    schedule={},
    facts={},
    log_keys={},
)
SUMMARY = Summary(OUTCOME, BENCHMARK, "valid run under v5.1", "1x NVIDIA H200", paths={"log": "/runs/result_0.txt"})


def test_the_text_has_quality_times_verdict_and_paths(tmp_path, capsys):
    text = write_summary(SUMMARY, tmp_path)
    assert capsys.readouterr().err == text + "\n"
    for part in (
        "eval_accuracy 0.7601 (target >= 0.759)",
        "12.35 minutes from run_start to run_stop",
        "2,764 samples/s",
        "seed        42",
        "valid run under v5.1",
        "one run is not a score",
        "/runs/result_0.txt",
        str(tmp_path / "summary.png"),
    ):
        assert part in text


@pytest.mark.parametrize(
    ("outcome", "benchmark", "note"),
    [
        ({}, {"data_set": "synthetic"}, "not an MLPerf result of any division"),
        ({}, {"data_set": "custom"}, "not an MLPerf result of any division: the data are custom"),
        ({"resumed": True}, {}, "a resumed run is not scored"),
        ({"status": "aborted", "history": []}, {}, "no evaluation (target"),
        ({}, {"targets": {"eval_accuracy": TargetConfig(0.759, "lower")}}, "eval_accuracy 0.5 (target <= 0.759"),
    ],
)
def test_reasons_against_a_result_are_in_the_text(tmp_path, outcome, benchmark, note):
    summary = replace(SUMMARY, outcome=replace(OUTCOME, **outcome), benchmark=replace(BENCHMARK, **benchmark))
    assert note in write_summary(summary, tmp_path)


@pytest.mark.parametrize("losses", [OUTCOME.losses, [], [(1, float("nan"))], [(1, 2.0)]])
def test_the_picture_is_a_whole_png(tmp_path, losses):
    write_summary(replace(SUMMARY, outcome=replace(OUTCOME, losses=losses)), tmp_path)
    data = (tmp_path / "summary.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 600
    assert [path.name for path in tmp_path.iterdir()] == ["summary.png"]


@pytest.mark.parametrize(
    ("ranks", "hidden", "text"),
    [
        (0, 0.0, "4 evaluations in 8.00 s, 0% of it hidden behind training"),
        (2, 6.0, "4 evaluations in 8.00 s on 2 ranks of their own, 75% of it hidden behind training"),
    ],
)
def test_the_hidden_part_of_evaluations_is_in_the_text(tmp_path, ranks, hidden, text):
    outcome = replace(OUTCOME, evaluations=4, evaluation_seconds=8.0, hidden_seconds=hidden)
    assert text in write_summary(replace(SUMMARY, outcome=outcome, evaluation_ranks=ranks), tmp_path)
