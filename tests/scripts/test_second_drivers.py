"""A series has one driver at a time: a second one while the first runs, and after it has ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import cli
from common.config.composition import compose
from common.launch.experiment import begin
from common.launch.launch_config import LaunchConfig
from common.launch.series import read_runs
from tests.conftest import Finished
from tests.scripts.driver import RESNET_KEEPING_CACHES, SCRIPTS, script

pytestmark = pytest.mark.timeout(1200)


def results(tmp_path: Path) -> Path:
    return tmp_path / "results" / "resnet"


def hooked(tmp_path: Path, lines: str, *arguments: str, **environment: str) -> Finished:
    """Run a driver whose hook before each run is a shell script with ``lines``."""
    (tmp_path / "hook").write_text(lines)
    hook = f"launch.hooks.pre_run=['. {tmp_path}/hook']"
    return script("run.sub", *RESNET_KEEPING_CACHES, hook, *arguments, cwd=tmp_path, **environment)


def test_a_second_driver_on_the_same_machine_is_refused(tmp_path: Path, data_of) -> None:
    """The hook of the first driver starts the second one, so that the first certainly runs."""
    data = f"data_dir={data_of('resnet')}"
    second = f"""
        lock=$(basename {results(tmp_path)}/*.lock .lock)
        bash {SCRIPTS}/run.sub {" ".join(RESNET_KEEPING_CACHES)} {data} launch.series=$lock 2>{tmp_path}/errors
        echo $? >{tmp_path}/code
        exit 4
    """
    first = hooked(tmp_path, second, data)
    assert (tmp_path / "code").read_text().strip() == "2"
    errors = (tmp_path / "errors").read_text()
    assert "another driver is running it" in errors
    assert f"on {os.uname().nodename} since" in errors
    assert first.code == 1
    (series,) = read_runs(results(tmp_path))
    (run,) = series.experiments
    assert run.end is not None
    assert (run.end.exit_code, run.end.status) == (1, "not started")


def test_a_series_whose_driver_was_killed_goes_on(tmp_path: Path, data_of) -> None:
    lines = '[[ $EXPERIMENT != 1 ]] || kill -KILL "$PPID"\nexit 4\n'
    data = f"data_dir={data_of('resnet')}"
    assert hooked(tmp_path, lines, data).code == -9
    (left,) = read_runs(results(tmp_path))
    assert left.experiments[0].end is None
    assert (results(tmp_path) / f"{left.name}.lock").read_text().startswith("process ")
    assert hooked(tmp_path, lines, data, f"launch.series={left.name}").code == 1
    (series,) = read_runs(results(tmp_path))
    assert [run.end.exit_code for run in series.experiments if run.end] == [None, 1]


@pytest.fixture(scope="module")
def data(data_of) -> str:
    return f"data_dir={data_of('resnet')}"


@pytest.mark.parametrize(
    ("program", "lines", "message"),
    [
        ("squeue", "echo 11; echo 12", "job 12 is still there, with experiment 1"),
        ("squeue", "echo 13; exit 1", "job 12 may still be there, with experiment 1"),
        ("timeout", "exit 124", "job 12 may still be there, with experiment 1"),
        ("squeue", "", None),
        ("squeue", "echo 112", None),
    ],
    ids=["lists the job", "fails", "times out", "has no jobs", "lists another job"],
)
def test_a_job_is_over_only_when_squeue_answers_and_does_not_list_it(
    tmp_path: Path, data: str, program: str, lines: str, message: str | None
) -> None:
    """The series continues outside of Slurm; the hook ends it before any run."""
    overrides = [*RESNET_KEEPING_CACHES, data, f"launch.results={results(tmp_path)}"]
    tree = compose(overrides)
    begin(tree, LaunchConfig.load(tree), "s", overrides, {"SLURM_JOB_ID": "12"}, cli.admitted)
    stub = tmp_path / "bin" / program
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/bash\n{lines}\n")
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    done = hooked(tmp_path, "exit 4", data, "launch.series=s", PATH=path)
    (series,) = read_runs(results(tmp_path))
    if message is None:
        assert [run.end.exit_code for run in series.experiments if run.end] == [None, 1]
    else:
        assert done.code == 2
        assert message in done.errors
        assert [run.end for run in series.experiments] == [None]
