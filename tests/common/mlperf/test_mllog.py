"""RunLog: ranks and files that it writes, repeated keys, and call sites."""

from __future__ import annotations

import inspect
import json
import math
import os
import threading

import numpy as np
import pytest

from common.errors import ConfigError
from common.mlperf.mllog import RunLog

TOKEN = ":::MLLOG "


def records(text: str) -> list[dict]:
    return [json.loads(line.removeprefix(TOKEN)) for line in text.splitlines()]


def test_line_has_the_fields_of_the_format_in_order(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        log.start("run_start", time_ms=1700000000001)
        log.end("epoch_stop", None, {"epoch_num": 3}, time_ms=1700000000002)
        log.event("seed", 7, time_ms=1700000000003)
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(line.startswith(TOKEN + '{"namespace": "", "time_ms": 17') for line in lines)
    found = [json.loads(line[len(TOKEN) :]) for line in lines]
    assert [list(r) for r in found] == [["namespace", "time_ms", "event_type", "key", "value", "metadata"]] * 3
    assert [r["event_type"] for r in found] == ["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]
    assert [r["time_ms"] for r in found] == [1700000000001, 1700000000002, 1700000000003]
    assert found[1]["metadata"]["epoch_num"] == 3


def test_same_lines_go_to_standard_output_and_file(tmp_path, capfd):
    with RunLog(tmp_path / "log", 0) as log:
        log.event("seed", 7)
        log.event("train_samples", 8)
    assert capfd.readouterr().out == (tmp_path / "log").read_text()


def test_several_logs_in_one_process_do_not_repeat_lines(tmp_path, capfd):
    for index in range(3):
        with RunLog(tmp_path / f"log{index}", 0) as log:
            log.event("seed", index)
    assert [r["value"] for r in records(capfd.readouterr().out)] == [0, 1, 2]
    assert [len(records((tmp_path / f"log{i}").read_text())) for i in range(3)] == [1, 1, 1]


def test_other_ranks_write_nothing(tmp_path, capfd):
    with RunLog(tmp_path / "log", 1) as log:
        log.start("init_start")
        log.end("init_stop")
        log.event("seed", 1)
        log.event("seed", 2)
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "log").exists()


def test_call_site_is_the_callers_line_relative_to_the_repository(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        for call in (log.start, log.end, log.event):
            call("tracked_stats")
            line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    for record in records((tmp_path / "log").read_text()):
        assert record["metadata"] == {"file": "tests/common/mlperf/test_mllog.py", "lineno": line}


def test_existing_log_is_not_overwritten(tmp_path):
    path = tmp_path / "log"
    path.write_text("precious\n")
    with pytest.raises(ConfigError, match="exists"):
        RunLog(path, 0)
    assert path.read_text() == "precious\n"


def test_missing_folder_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be created"):
        RunLog(tmp_path / "no" / "log", 0)


@pytest.mark.parametrize("key", ["seed", "global_batch_size", "opt_name", "lars_epsilon", "submission_org"])
def test_single_key_with_another_value_is_an_error(tmp_path, key):
    with RunLog(tmp_path / "log", 0) as log:
        log.event(key, 1)
        log.event(key, 1)
        with pytest.raises(ValueError, match=key):
            log.event(key, 2)
    assert [r["value"] for r in records((tmp_path / "log").read_text())] == [1]


@pytest.mark.parametrize("key", ["init_stop", "run_start", "run_stop"])
def test_the_clock_starts_and_stops_once(tmp_path, key):
    with RunLog(tmp_path / "log", 0) as log:
        log.end(key, None, {"status": "success"})
        with pytest.raises(ValueError, match=key):
            log.end(key, None, {"status": "success"})


def test_repeating_keys_repeat(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        log.event("eval_accuracy", 0.1, {"epoch_num": 1})
        log.event("eval_accuracy", 0.2, {"epoch_num": 2})
        log.start("init_start")
        log.start("init_start")
    assert len(records((tmp_path / "log").read_text())) == 4


def test_non_finite_statistics_stay_strict_json(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        log.event("tracked_stats", {"loss": math.nan, "throughput": [1.0, math.inf]}, {"step": 1, "x": -math.inf})

    def refuse(text: str) -> None:
        raise AssertionError(f"not strict JSON: {text}")

    text = (tmp_path / "log").read_text().removeprefix(TOKEN)
    record = json.loads(text, parse_constant=refuse)
    assert record["value"] == {"loss": None, "throughput": [1.0, None]}
    assert record["metadata"]["x"] is None


def test_diverged_accuracy_and_infinite_clip_stay_numbers_for_the_checker(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        log.event("eval_accuracy", math.nan, {"epoch_num": 1})
        log.event("opt_gradient_clip_norm", math.inf)
    first, second = records((tmp_path / "log").read_text())
    assert math.isnan(first["value"])
    assert second["value"] == math.inf


def test_numpy_values_are_written_as_numbers(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        log.event("train_samples", np.int64(5))
        log.event("tracked_stats", np.arange(3))
    assert [r["value"] for r in records((tmp_path / "log").read_text())] == [5, [0, 1, 2]]


def test_value_that_is_not_json_is_an_error_and_leaves_no_line(tmp_path):
    with RunLog(tmp_path / "log", 0) as log, pytest.raises(TypeError, match="cannot be logged"):
        log.event("tracked_stats", object())
    assert (tmp_path / "log").read_text() == ""


def test_metadata_cannot_replace_the_call_site(tmp_path):
    with RunLog(tmp_path / "log", 0) as log, pytest.raises(TypeError, match="lineno"):
        log.event("seed", 1, {"lineno": 3})


@pytest.mark.parametrize("text", ["global_batch_size", "submission_benchmark", "eval_accuracy", "eval_error"])
def test_other_events_have_no_text_that_the_rcp_checker_searches(tmp_path, text):
    with RunLog(tmp_path / "log", 0) as log:
        with pytest.raises(ValueError, match="RCP checker"):
            log.event("configuration", {text: 1})
        with pytest.raises(ValueError, match="RCP checker"):
            log.event("tracked_stats", 1, {"of": f"last {text}"})


def test_before_line_is_called_before_each_line(tmp_path, capfd):
    with RunLog(tmp_path / "log", 0) as log:
        log.before_line = lambda: print("<clear>", flush=True)
        log.event("seed", 1)
        log.event("tracked_stats", 1)
    starts = [line[:8] for line in capfd.readouterr().out.splitlines()]
    assert starts == ["<clear>", ":::MLLOG", "<clear>", ":::MLLOG"]
    assert "<clear>" not in (tmp_path / "log").read_text()


def test_lines_of_several_threads_stay_whole(tmp_path):
    with RunLog(tmp_path / "log", 0) as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.event("tracked_stats", "x" * 3000, {"i": i}) for _ in range(20)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(records((tmp_path / "log").read_text())) == 80


def test_full_disk_is_an_error():
    with RunLog(None, 0) as log:
        log._logger.logger._fd = os.open("/dev/full", os.O_WRONLY)
        with pytest.raises(OSError, match="No space left"):
            log.event("seed", 1)


def test_closed_log_takes_no_events(tmp_path):
    log = RunLog(tmp_path / "log", 0)
    log.close()
    with pytest.raises(OSError, match="closed"):
        log.event("seed", 1)
