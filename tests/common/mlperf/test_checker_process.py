"""MLCommons' checkers in a separate process."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import psutil
import pytest
from handwritten_logs import replaced, resnet_lines

from common.mlperf import checker_process
from common.mlperf.checker_process import CheckerStopped, one_checker_process
from common.mlperf.compliance import check_lines, inadmissible
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.verdict import judge

WriteLog = Callable[..., Path]


Children = Callable[[], list[psutil.Process]]


def _checkers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "checker_worker" in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    """The checkers that this test started: tests that ran before in this process may share one of their own."""
    monkeypatch.setattr(checker_process, "_current", ContextVar("checker_process", default=None))
    others = _checkers()
    return lambda: [child for child in _checkers() if child not in others]


def findings(log: ParsedLog) -> object:
    with one_checker_process() as checker:
        return checker.ask("compliance", [log], usage="training", ruleset="4.0.0")


def test_answers_are_those_of_the_checker_itself(write_log):
    log = read_log(write_log(replaced(resnet_lines(), "lars_epsilon", 1e-5)))
    own = check_lines([event.text for event in log.events], "training", "4.0.0")
    assert own
    assert findings(log) == [vars(finding) for finding in own]


def test_one_process_answers_within_a_block_and_ends_with_it(write_log, children):
    log = read_log(write_log(resnet_lines()))
    with one_checker_process():
        findings(log)
        before = children()
        findings(log)
        assert children() == before
        assert len(before) == 1
    assert not before[0].is_running()


def test_a_process_that_died_is_replaced_by_another(write_log, children):
    log = read_log(write_log(resnet_lines()))
    with one_checker_process():
        findings(log)
        (child,) = children()
        child.kill()
        child.wait()
        assert findings(log) == []
        assert children() != [child]


def test_a_missing_answer_is_an_error_with_the_last_output_of_the_process(write_log, monkeypatch):
    log = read_log(write_log(resnet_lines()))
    with one_checker_process() as checker, pytest.raises(CheckerStopped, match=r"it died.*KeyError: 'no such task'"):
        checker.ask("no such task", [log])


def test_a_log_without_an_answer_of_the_checker_is_refused(write_log, monkeypatch):
    monkeypatch.setattr(checker_process, "SECONDS", 0.0)
    verdict = judge(write_log(resnet_lines()))
    assert verdict.kind == "refused"
    assert verdict.reasons[0].startswith("the compliance checker cannot judge this log")


def test_time_in_which_the_checker_does_not_run_is_not_counted(write_log, monkeypatch):
    """On a loaded machine, a process gets little CPU time."""
    monkeypatch.setattr(checker_process, "SECONDS", 1e-9)
    monkeypatch.setattr(checker_process, "_cpu_seconds", lambda pid: 0.0)
    assert findings(read_log(write_log(resnet_lines()))) == []


@pytest.mark.parametrize("key", ["submission_division", "submission_benchmark", "opt_name"])
@pytest.mark.parametrize("value", ["../closed", "closed_common.yaml\0", "{0}", 7, None, ["lars"]])
def test_values_that_name_no_rule_file_are_found_before_the_checker_sees_them(write_log, key, value):
    log = read_log(write_log(replaced(resnet_lines(), key, value)))
    number = next(event.line for event in log.events if event.key == key)
    found = inadmissible(log.events, "training", "4.0.0")
    assert len(found) == 1
    assert found[0].startswith(f"line {number}: {key} = ")


def test_values_of_every_rule_file_are_admissible(write_log):
    assert inadmissible(read_log(write_log(resnet_lines())).events, "training", "4.0.0") == []
