"""The file of metrics: one JSON object per line, whole lines only, nothing lost."""

import contextlib
import errno
import json
import os

import pytest

from common import optional_packages
from common.errors import ConfigError, SuiteError
from common.observe import metrics
from common.observe.metrics import MetricsWriter
from common.report.steps import read_steps
from tests.stopped_clock import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_step(tmp_path, clock):
    writer = MetricsWriter(tmp_path / "deep" / "metrics.jsonl", 0)
    writer.write(1, 64, 2.5, step_ms=12.5, data_wait_ms=0.25, lr=0.1)
    writer.write(2, 128, 2.25, step_ms=12.0, data_wait_ms=0.5, lr=0.2)
    writer.close()
    first, second = lines(writer.path)
    assert first == {
        "step": 1, "samples": 64, "loss": 2.5, "lr": 0.1, "step_ms": 12.5, "data_wait_ms": 0.25, "time": 1000.0
    }  # fmt: skip
    assert second["samples"] == 128


def test_lines_are_written_after_a_second(tmp_path, clock):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0)
    writer.write(1, 64, 2.5)
    assert writer.path.read_text() == ""
    clock.now += 1.0
    writer.write(2, 128, 2.5)
    assert [record["step"] for record in lines(writer.path)] == [1, 2]
    writer.close()


def test_values_that_json_lacks_are_null(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0)
    writer.write(1, 64, float("nan"), gradient_norm=float("inf"))
    writer.close()
    assert lines(writer.path)[0]["loss"] is None
    assert lines(writer.path)[0]["gradient_norm"] is None


def test_other_ranks_write_their_steps_but_no_tensorboard(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 1, tensorboard_dir=tmp_path / "board")
    writer.write(1, 64, 2.5)
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = MetricsWriter(path, 0)
    writer.write(2, 128, 2.5)
    writer.close()
    assert [record["step"] for record in lines(path)] == [1, 2]


def test_a_full_disk_is_one_error_and_leaves_whole_lines(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0)
    writer.write(1, 64, 2.5)
    writer.flush()
    write = os.write

    def full(file, line):
        if len(line) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, line[:10])

    writer.write(2, 128, 2.5)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SuiteError, match="No space left on device"):
        writer.flush()
    assert [record["step"] for record in lines(writer.path)] == [1]


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboard")
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0, tensorboard_dir=tmp_path / "board")
    writer.write(1, 64, 2.5)
    writer.evaluation(64, {"accuracy": 0.5}, seconds=2.0, waited_seconds=0.5)
    writer.close()
    assert any("tfevents" in path.name for path in (tmp_path / "board").iterdir())


def test_missing_tensorboard_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(optional_packages, "_import_all", "{0.name} is not installed".format)
    with pytest.raises(ConfigError, match=r"mlperf-suite\[tensorboard\]"):
        MetricsWriter(tmp_path / "metrics.jsonl", 0, tensorboard_dir=tmp_path / "board")


def test_evaluations_are_records_of_their_own_beside_the_steps_of_rank_0(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics_rank0.jsonl", 0)
    writer.evaluation(64, {"accuracy": 0.5}, seconds=2.0, waited_seconds=0.5)
    writer.close()
    assert (tmp_path / "metrics_rank0.jsonl").read_text() == ""
    record = json.loads((tmp_path / "evaluations.jsonl").read_text())
    del record["time"]
    assert record == {"samples": 64, "accuracy": 0.5, "seconds": 2.0, "waited_seconds": 0.5}


def test_a_rank_that_only_evaluates_writes_its_evaluations_as_records_without_a_step(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics_rank2.jsonl", 2)
    writer.evaluated(0, 64, evaluation_ms=7.0)
    writer.close()
    record = json.loads((tmp_path / "metrics_rank2.jsonl").read_text())
    del record["time"]
    assert record == {"evaluation": 0, "samples": 64, "evaluation_ms": 7.0}
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_the_report_counts_no_steps_of_a_rank_that_only_evaluates(tmp_path):
    for rank in (0, 1):
        with contextlib.closing(MetricsWriter(tmp_path / f"metrics_rank{rank}.jsonl", rank)) as writer:
            if rank == 0:
                writer.write(1, 64, 2.5)
            else:
                writer.evaluated(0, 64, evaluation_ms=7.0)
    assert [steps.rank for steps in read_steps(tmp_path, 0, 1e10)] == [0]


def test_self_play_has_a_file_of_its_own_on_each_rank_that_plays(tmp_path):
    playing, training = (MetricsWriter(tmp_path / f"metrics_rank{rank}.jsonl", rank) for rank in (3, 4))
    playing.self_play(generation=2, games_per_second=1.5, bound="search")
    playing.flush()
    (record,) = (json.loads(line) for line in (tmp_path / "self_play_rank3.jsonl").read_text().splitlines())
    assert record.pop("time") > 0
    assert record == {"generation": 2, "games_per_second": 1.5, "bound": "search"}
    playing.self_play(games_per_second=float("nan"))
    playing.close()
    training.close()
    last = json.loads((tmp_path / "self_play_rank3.jsonl").read_text().splitlines()[-1])
    assert last["games_per_second"] is None
    assert (tmp_path / "metrics_rank3.jsonl").read_bytes() == b""
    assert not (tmp_path / "self_play_rank4.jsonl").exists()
