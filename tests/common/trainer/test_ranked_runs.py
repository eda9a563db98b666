"""Whole runs whose last ranks only evaluate: the same scores and the same end as in line, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from common.mlperf.verdict import judge
from tests.command_line import assert_closed_as_aborted, await_that, descendants, finish, started, the_message, training
from tests.conftest import Finished

SECONDS = 240
ERROR_OF_DATA, INTERRUPTED = 3, 143


@contextlib.contextmanager
def job(
    data: Path, output: Path, training_ranks: int, ranks: int, *overrides: str, script: str
) -> Iterator[Popen[str]]:
    """A run of ResNet's test recipe with so many ranks that train and that evaluate as ``script`` says."""
    world = training_ranks + ranks
    command = [sys.executable, "-m", "tests.common.trainer.launch_scripted", str(world), script]
    fixed = [f"scale.gpus_per_node={world}", f"evaluation.ranks={ranks}"]
    with started(training(data, output, *fixed, *overrides), command=command) as process:
        yield process


def done(data: Path, output: Path, training_ranks: int, ranks: int, *overrides: str, script: str = "score") -> Finished:
    """The same, ended."""
    with job(data, output, training_ranks, ranks, *overrides, script=script) as process:
        return finish(process, SECONDS)


def logged(output: Path, key: str) -> list[tuple[object, int | None, str | None]]:
    """Value, epoch and status of each event of ``key`` in the log."""
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in (output / "mlperf.log").read_text().splitlines()]
    found = [line for line in lines if line["key"] == key]
    return [(line["value"], line["metadata"].get("epoch_num"), line["metadata"].get("status")) for line in found]


@pytest.fixture(scope="module")
def in_line(data_of, tmp_path_factory) -> list[tuple[object, int | None, str | None]]:
    """The scores of four evaluations on two training ranks."""
    output = tmp_path_factory.mktemp("in line") / "out"
    ended = done(data_of("resnet"), output, 2, 0, "benchmark.schedule.last_epoch=4", "benchmark.target=2")
    assert ended.code == 10, ended.errors
    return logged(output, "eval_accuracy")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_with_the_evaluation_that_ends_it_in_line(ranks, in_line, data_of, tmp_path):
    values = [float(str(value)) for value, _, _ in in_line]
    assert values[1] > values[0], "the second evaluation is the first to reach the target of this test"
    target = (values[0] + values[1]) / 2
    overrides = ["benchmark.schedule.last_epoch=9", f"benchmark.target={target}"]
    ended = done(data_of("resnet"), tmp_path / "out", 2, ranks, *overrides)
    assert ended.code == 0, ended.errors
    assert logged(tmp_path / "out", "eval_accuracy") == in_line[:2]
    assert logged(tmp_path / "out", "run_stop") == [(None, 2, "success")]
    assert "Traceback" not in ended.errors
    verdict = judge(tmp_path / "out" / "mlperf.log")
    assert verdict.kind == "format", verdict.reasons
    records = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert [record["samples"] for record in records] == [96, 192]
    own = [json.loads(line) for line in (tmp_path / "out" / "metrics_rank2.jsonl").read_text().splitlines()]
    assert [record["samples"] for record in own][:2] == [96, 192]


@pytest.mark.slow
def test_an_evaluation_that_ends_after_the_last_block_decides_the_run(in_line, data_of, tmp_path):
    values = [float(str(value)) for value, _, _ in in_line]
    target = (values[0] + values[1]) / 2
    overrides = ["benchmark.schedule.last_epoch=2", f"benchmark.target={target}"]
    released = tmp_path / "released"
    with job(data_of("resnet"), tmp_path / "out", 2, 1, *overrides, script=f"await {released}") as process:
        log = tmp_path / "out" / "mlperf.log"
        await_that(lambda: log.exists() and log.read_text().count('"eval_start"') == 2, process)
        assert logged(tmp_path / "out", "run_stop") == []
        released.touch()
        ended = finish(process, SECONDS)
    assert ended.code == 0, ended.errors
    assert logged(tmp_path / "out", "eval_accuracy") == in_line[:2]
    assert logged(tmp_path / "out", "run_stop") == [(None, 2, "success")]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "reason"), [("raise", "second evaluation fails"), ("broken data", "are broken")])
def test_an_evaluation_rank_that_fails_ends_the_job_and_is_named(script, reason, data_of, tmp_path):
    overrides = ["benchmark.schedule.last_epoch=2000", "benchmark.target=2"]
    with job(data_of("resnet"), tmp_path / "out", 2, 1, *overrides, script=script) as process:
        ended = finish(process, SECONDS)
    assert ended.code == ERROR_OF_DATA, ended.errors
    message = the_message(ended)
    assert "rank 2, which evaluates" in message
    assert reason in message
    assert_closed_as_aborted(tmp_path / "out" / "mlperf.log")


@pytest.mark.slow
def test_sigterm_ends_ranks_of_both_roles_and_leaves_a_checkpoint(data_of, tmp_path):
    overrides = ["benchmark.schedule.last_epoch=2000", "benchmark.target=2"]
    output = tmp_path / "out"
    with job(data_of("resnet"), output, 2, 1, *overrides, script="score") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and "eval_accuracy" in log.read_text(), process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process, SECONDS)
    assert ended.code == INTERRUPTED, ended.errors
    assert "stopped by a signal at step" in the_message(ended)
    assert_closed_as_aborted(log)
    assert list((output / "checkpoints").glob("step_*/rank_1.pt"))


@pytest.mark.slow
def test_a_training_rank_that_is_killed_leaves_no_evaluation_rank_behind(data_of, tmp_path):
    overrides = ["benchmark.schedule.last_epoch=2000", "benchmark.target=2"]
    output = tmp_path / "out"
    with job(data_of("resnet"), output, 2, 1, *overrides, script="score") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and "eval_accuracy" in log.read_text(), process)
        family = descendants(process.pid)
        (victim,) = [child for child in family if _rank(child) == "1" and child.ppid() == process.pid]
        victim.kill()
        ended = finish(process, SECONDS)
        _, alive = psutil.wait_procs(family, timeout=10)
    assert ended.code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in the_message(ended)
    assert not alive


def _rank(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RANK")
    return None
