"""The command `check` on logs and folders: what it prints and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from closed_logs import POINT, closed_log, event
from launched import log_of

from common import cli
from common.errors import ConfigError, DataError
from common.submission.check import main


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """Five logs of a result, in launch order."""
    paths = [tmp_path / f"run{index}.log" for index in range(5)]
    for index, path in enumerate(paths):
        path.write_text(closed_log("resnet", index))
    return paths


def test_each_log_and_the_set_are_judged(logs, capsys):
    assert main([str(path) for path in logs]) == 0
    out = capsys.readouterr().out
    assert (out.count("VALID RUN"), out.count("SUBMITTABLE")) == (5, 1)


def test_one_log_is_no_set(logs, capsys):
    assert main([str(logs[0])]) == 0
    out = capsys.readouterr().out
    assert (out.count("VALID RUN"), out.count("one run is never a score"), out.count("REFUSED")) == (1, 1, 0)


def test_output_folder_of_one_run_is_that_run(logs, capsys):
    (logs[0].parent / "run").mkdir()
    logs[0].rename(logs[0].parent / "run" / "mlperf.log")
    assert main([str(logs[0].parent / "run")]) == 0
    assert "run/mlperf.log: VALID RUN" in capsys.readouterr().out


def test_log_of_synthetic_data_exits_with_zero(logs, capsys):
    with logs[0].open("a") as file:
        file.write(event(1_700_000_000_000, POINT, "data_set", "stand-in") + "\n")
    assert main([str(logs[0])]) == 0
    assert "FORMAT" in capsys.readouterr().out


def test_refused_log_exits_with_one(logs, capsys):
    assert main([str(logs[0]), "--ruleset", "5.0.0"]) == 1
    assert "REFUSED" in capsys.readouterr().out


@pytest.mark.parametrize(("cut", "code", "word"), [(1, 0, "SUBMITTABLE"), (2, 1, "2 runs did not converge")])
def test_a_log_that_was_cut_short_is_a_failed_run_of_its_set(logs, capsys, cut, code, word):
    """The package checker accepts one log that does not comply, as the slowest run."""
    for path in logs[:cut]:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"run_stop"' not in line))
    assert main([str(path) for path in logs]) == code
    out = capsys.readouterr().out
    assert f"{logs[0]}: REFUSED" in out
    assert word in out


def test_folder_with_a_single_run_is_no_result(results, capsys):
    lines = (results / "runs.jsonl").read_text().splitlines(keepends=True)
    (results / "runs.jsonl").write_text("".join(lines[:2]).replace('"declared": 5', '"declared": 1'))
    for number in range(2, 6):
        log_of(results, number).unlink()
    assert main([str(results)]) == 1
    assert "needs 5 runs, these are 1" in capsys.readouterr().out


def test_series_without_run_start_has_no_runs(results, capsys):
    lines = (results / "runs.jsonl").read_text().replace('"status": "success"', '"status": "not started"')
    (results / "runs.jsonl").write_text(lines)
    for number in range(1, 6):
        log_of(results, number).write_text("the node is down\n")
    assert main([str(results)]) == 1
    assert "(0 runs): REFUSED" in capsys.readouterr().out


def test_damaged_runs_file_is_an_error(results):
    with (results / "runs.jsonl").open("a") as file:
        file.write('{"event": "beg')
    with pytest.raises(DataError, match=r"runs\.jsonl, line 11"):
        main([str(results)])


@pytest.mark.parametrize("ruleset", ["1.2.3", "4"])
def test_unknown_ruleset_is_an_error(logs, ruleset):
    with pytest.raises(ConfigError, match=f"--ruleset {ruleset}: not known"):
        main([str(logs[0]), "--ruleset", ruleset])


def test_command_line_prints_one_message_and_the_errors_code(tmp_path, capsys):
    assert cli.run(["check", str(tmp_path / "absent")]) == DataError.exit_code
    assert "absent: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "summarize", "report"])
def test_a_name_that_the_file_system_cannot_have_is_one_message(tmp_path, command, capsys):
    assert cli.run([command, str(tmp_path / ("x" * 300))]) == DataError.exit_code
    assert capsys.readouterr().err.startswith("mlperf-suite: DataError: ")


def test_ctrl_c_is_one_message_and_the_code_of_shells(monkeypatch, capsys):
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "check", interrupted)
    assert cli.run(["check", "x"]) == 130
    assert capsys.readouterr().err == "mlperf-suite: Interrupted: check was stopped by Ctrl-C\n"
