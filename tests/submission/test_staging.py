"""Logs of HPC rounds that state when their data were staged: judged as MLCommons' compliance checker judges them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from closed_logs import END, START, closed_log, event

from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.parsed_log import read_log
from common.mlperf.rules import RULESETS, rules_for
from common.mlperf.verdict import judge

FIRST_MS = 1_700_000_000_000


def write_staged(path: Path, before: str, start: int | None, stop: int) -> Path:
    """Write a CosmoFlow log with staging in front of the first event ``before``.

    Args:
        start, stop: seconds after the first line; no start for None.
    """
    lines = closed_log("cosmoflow", 5, start=FIRST_MS).splitlines()
    at = next(index for index, line in enumerate(lines) if f'"{before}"' in line)
    started = [] if start is None else [event(FIRST_MS + 1000 * start, START, "staging_start")]
    staged = [*started, event(FIRST_MS + 1000 * stop, END, "staging_stop", None, staging_duration=2)]
    path.write_text("".join(f"{line}\n" for line in [*lines[:at], *staged, *lines[at:]]))
    return path


def accepted_by_mlcommons(log: Path, ruleset: str) -> bool:
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "hpc", "--ruleset", ruleset]
    command += ["--log_output", "/dev/null", str(log)]
    return "SUCCESS" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("ruleset", RULESETS["hpc"])
@pytest.mark.parametrize(("before", "start"), [("init_stop", 10), ("train_samples", 62)])
def test_staging_is_timed_up_to_v2(tmp_path, ruleset, before, start):
    log = write_staged(tmp_path / "run.log", before, start, start + 2)
    valid = before == "train_samples" or ruleset == "3.0.0"
    assert accepted_by_mlcommons(log, ruleset) == valid
    assert (judge(log, ruleset).kind == "valid run") == valid


def test_only_hpc_v3_stages_before_the_clock_runs():
    assert [ruleset for ruleset in RULESETS["hpc"] if not rules_for("cosmoflow", ruleset).staging_timed] == ["3.0.0"]
    assert rules_for("resnet", "3.0.0").staging_timed


@pytest.mark.parametrize(
    ("start", "stop", "reason"),
    [
        (None, 64, "staging_stop comes without a staging_start before it"),
        (70, 66, "staging_stop is 4.0 s earlier than"),
    ],
)
def test_staging_that_ends_before_it_starts_is_refused(tmp_path, start, stop, reason):
    verdict = judge(write_staged(tmp_path / "run.log", "train_samples", start, stop), "3.0.0")
    assert verdict.kind == "refused"
    assert reason in verdict.refusals[0]


def test_the_trainers_events_state_the_staging_and_its_duration(tmp_path):
    with RunLog(tmp_path / "run.log", rank=0) as log:
        events = RunEvents(log, "epoch_num")
        events.staging_start()
        events.staging_stop(2.5)
    found = read_log(tmp_path / "run.log").events
    assert [each.key for each in found] == ["staging_start", "staging_stop"]
    assert found[1].metadata["staging_duration"] == 2.5
