"""The scripts that compare estimates with measurements: they read logs as published, and calibrate one factor."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from common.planning.compute import ComputeCurve
from tests.common.mlperf.handwritten_logs import POINT, encode, resnet_lines
from tests.conftest import ROOT

PUBLISHED = runpy.run_path(str(ROOT / "scripts" / "compare_published.py"))
Row = PUBLISHED["Row"]


def results(folder: Path, throughput: float, nodes: int = 8, accelerator: str = "NVIDIA H100-SXM5-80GB") -> None:
    """Write the logs of a result on nodes of 8 GPUs: 35 epochs in 10, 11, 12, 13 and 14 minutes."""
    submitter = folder / "v4.0" / "acme"
    logs = submitter / "results" / "system" / "resnet"
    logs.mkdir(parents=True)
    (submitter / "systems").mkdir()
    system = {"number_of_nodes": str(nodes), "accelerators_per_node": "8", "accelerator_model_name": accelerator}
    (submitter / "systems" / "system.json").write_text(json.dumps(system))
    for index in range(5):
        lines = resnet_lines(minutes=10.0 + index)
        lines[-1:-1] = [(POINT, "tracked_stats", {"throughput": throughput}, {}, 100)]
        text = "".join(encode(line, number) for number, line in enumerate(lines))
        (logs / f"result_{index}.txt").write_text(text)


RATE = 35 * 1_281_167 / (12 * 60)
"""Samples per second of the olympic mean of :func:`results`."""


@pytest.mark.parametrize("unit", [1.0, 1 / 64])
def test_a_row_has_mean_time_samples_and_step_whatever_the_unit_of_the_throughput(tmp_path, unit):
    results(tmp_path, throughput=1.05 * RATE * unit)
    (row,) = PUBLISHED["read_folder"](tmp_path, ["v4.0"])
    assert (row.benchmark, row.gpus, row.global_batch, row.accelerator) == ("resnet", 64, 3264, "H100")
    assert row.minutes == pytest.approx(12)
    assert row.samples == pytest.approx(35 * 1_281_167)
    assert row.step == pytest.approx(3264 / (1.05 * RATE))
    assert row.logs == "v4.0/acme/results/system/resnet"


def test_other_rounds_and_accelerators_are_left_out(tmp_path):
    results(tmp_path, throughput=RATE, accelerator="NVIDIA B200")
    assert list(PUBLISHED["read_folder"](tmp_path, ["v4.0"])) == []
    assert list(PUBLISHED["read_folder"](tmp_path, ["v4.1"])) == []


def test_further_rows_have_known_benchmarks_and_plausible_numbers():
    rows = list(PUBLISHED["read_further"](PUBLISHED["FURTHER"]))
    assert len({row.logs for row in rows}) == len(rows) > 20
    for row in rows:
        assert row.step is None or 0.9 < 60 * row.minutes / (row.samples / row.global_batch * row.step) < 1.7, row


def test_the_factor_changes_only_the_part_in_proportion_to_the_batch():
    curve = PUBLISHED["faster"](ComputeCurve((8, 192), (0.02, 0.066)), 2.0)
    assert curve.at(8) == pytest.approx(0.018 + 2 * 0.002)
    assert curve.at(192) == pytest.approx(0.018 + 2 * 0.048)


def test_one_factor_per_series_meets_the_step_of_its_smallest_system():
    def row(gpus: int, step: float) -> object:
        return Row("resnet", "4.0.0", "acme", "H200", gpus, 3200, 12.0, 44.8e6, step, f"{gpus}")

    small, large = PUBLISHED["compare"]([row(64, 0.01), row(8, 0.05)])
    assert (small.row.gpus, small.smallest, large.smallest) == (8, True, False)
    assert small.factor == large.factor
    assert small.estimate.step.total == pytest.approx(0.05, rel=1e-6)
    assert large.step == pytest.approx(large.estimate.step.total / 0.01 - 1)
    assert sum(large.parts.values()) == pytest.approx(large.time)


def test_a_result_of_two_rounds_counts_once_and_the_interval_is_counted():
    def row(ruleset: str, gpus: int, step: float, minutes: float) -> object:
        return Row("resnet", ruleset, "acme", "H200", gpus, 3200, minutes, 44.8e6, step, f"{ruleset}/{gpus}")

    rows = [row(ruleset, *values) for ruleset in ("3.0.0", "3.1.0") for values in ((8, 0.05, 12.0), (64, 0.01, 2.4))]
    rows.append(row("3.1.0", 400, 0.009, 100.0))
    text = PUBLISHED["table"](PUBLISHED["compare"](rows))
    assert "step time: 2 rows" in text
    assert "time to train of calibrated systems: 1 rows" in text
    assert "90 % interval: has 1 of 2 published times" in text


def test_a_row_that_cannot_be_planned_is_listed_with_the_reason():
    row = Row("rnnt", "3.1.0", "acme", "H200", 8, 100_000, 12.0, None, None, "")
    (found,) = PUBLISHED["compare"]([row])
    assert found.estimate is None
    assert "100000" in found.refusal
    assert "not modelled: 1 of 1 rows" in PUBLISHED["table"]([found])


def test_two_gpus_are_predicted_from_one():
    script = runpy.run_path(str(ROOT / "scripts" / "compare_two_gpus.py"))
    files = sorted((ROOT / "docs" / "results").glob("*.json"))
    found = [pair for name in ("resnet", "maskrcnn") for pair in script["pairs"](name, files)]
    assert [(pair.benchmark, pair.places) for pair in found] == [("resnet", (0, 1)), ("maskrcnn", (2, 3))]
    assert max(abs(pair.error) for pair in found) < 0.015


def test_a_folder_without_logs_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_published.py", str(tmp_path), "--rounds", "v4.0"])
    with pytest.raises(SystemExit):
        PUBLISHED["main"]()
    assert f"{tmp_path}: no logs of v4.0 below ROUND/SUBMITTER/results" in capsys.readouterr().err
