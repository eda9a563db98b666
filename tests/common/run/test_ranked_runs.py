"""Whole runs whose last ranks only evaluate: the scores and the end are those of inline scoring; failures."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from common.mlperf.verdict import judge
from tests import toy
from tests.command_line import (
    ENDLESS,
    Process,
    assert_closed_as_aborted,
    await_that,
    descendants,
    finish,
    is_training,
    logged,
    rank_process,
    ranked,
    started,
    the_message,
    training,
)
from tests.common.run.scripted_evaluation import largest_error
from tests.conftest import SECONDS, Finished

SECOND_IS_THE_FIRST_TO_REACH = largest_error(2)
"""A target between the scores of the first two evaluations on any CPU."""
ERROR_OF_DATA, INTERRUPTED = 3, 143


@contextlib.contextmanager
def job(data: Path, output: Path, training_ranks: int, ranks: int, *overrides: str, script: str) -> Iterator[Process]:
    """A run of the toy with training and evaluation ranks, whose evaluations follow ``script``."""
    world = training_ranks + ranks
    command = ranked("tests.common.run.scripted_evaluation", world, script)
    fixed = [f"scale.gpus_per_node={world}", f"evaluation.ranks={ranks}"]
    with started(training(data, output, *fixed, *overrides), command=command) as process:
        yield process


def done(data: Path, output: Path, training_ranks: int, ranks: int, *overrides: str, script: str = "score") -> Finished:
    """The same, ended."""
    with job(data, output, training_ranks, ranks, *overrides, script=script) as process:
        return finish(process, SECONDS)


def events(output: Path, key: str) -> list[tuple[object, int | None, str | None]]:
    """Value, epoch and status of each event of ``key`` in the log."""
    found = logged(output / "mlperf.log", key)
    return [(event["value"], event["metadata"].get("epoch_num"), event["metadata"].get("status")) for event in found]


@pytest.fixture(scope="module")
def in_line(data_of, tmp_path_factory) -> list[tuple[object, int | None, str | None]]:
    """The scores of four evaluations on two training ranks, each of weights of their own.

    The last bits of the weights differ between CPUs, and so do the scores; that they fall does not.
    """
    output = tmp_path_factory.mktemp("in line") / "out"
    ended = done(data_of(toy.NAME), output, 2, 0, "benchmark.schedule.last_epoch=4", ENDLESS[1])
    assert ended.code == 10, ended.errors
    scores = events(output, "eval_error")
    largest = [largest_error(number) for number in range(1, 6)]
    hashes = {
        (high - float(str(value))) / (high - low)
        for (value, _, _), (high, low) in zip(scores, itertools.pairwise(largest), strict=True)
    }
    assert len(hashes) == 4, "two evaluations saw the same weights"
    return scores


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_ranks_end_a_run_as_inline_scoring_does(ranks, in_line, data_of, tmp_path):
    overrides = [
        "benchmark.schedule.last_epoch=9",
        f"benchmark.targets.mean_absolute_error.value={SECOND_IS_THE_FIRST_TO_REACH}",
    ]
    ended = done(data_of(toy.NAME), tmp_path / "out", 2, ranks, *overrides)
    assert ended.code == 0, ended.errors
    assert events(tmp_path / "out", "eval_error") == in_line[:2]
    assert events(tmp_path / "out", "run_stop") == [(None, 2, "success")]
    assert "Traceback" not in ended.errors
    verdict = judge(tmp_path / "out" / "mlperf.log")
    assert verdict.kind == "format", verdict.reasons
    records = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert [record["samples"] for record in records] == [256, 512]
    own = [json.loads(line) for line in (tmp_path / "out" / "metrics_rank2.jsonl").read_text().splitlines()]
    assert [record["samples"] for record in own][:2] == [256, 512]


def in_order(output: Path) -> list[tuple[str, object]]:
    """Key and number of the log's events of training, and of starts of evaluations."""
    keys = ("block_start", "block_stop", "epoch_start", "epoch_stop", "tracked_stats", "eval_start", "run_stop")
    numbers = ("epoch_num", "first_epoch_num", "step")
    return [
        (line["key"], next((line["metadata"][name] for name in numbers if name in line["metadata"]), None))
        for line in logged(output / "mlperf.log", *keys)
    ]


def test_steps_stay_in_flight_between_blocks_when_other_ranks_evaluate(data_of, tmp_path):
    overrides = ["benchmark.schedule.last_epoch=3", ENDLESS[1], "steps_ahead=3"]
    counts, steps = {}, {}
    for name, ranks in (("in line", 0), ("ranked", 1)):
        script = f"count {tmp_path / name}.txt"
        ended = done(data_of(toy.NAME), tmp_path / name, 1, ranks, *overrides, script=script)
        assert ended.code == 10, ended.errors
        counts[name] = [int(line) for line in (tmp_path / f"{name}.txt").read_text().split()]
        records = [json.loads(line) for line in (tmp_path / name / "metrics_rank0.jsonl").read_text().splitlines()]
        steps[name] = [(record["step"], record["samples"]) for record in records]
    assert counts == {"in line": [0, 0, 0], "ranked": [3, 3, 0]}
    assert steps["ranked"] == steps["in line"] == [(step, 16 * step) for step in range(1, 49)]
    assert in_order(tmp_path / "ranked") == in_order(tmp_path / "in line")
    verdict = judge(tmp_path / "ranked" / "mlperf.log")
    assert verdict.kind == "format", verdict.reasons


def test_a_score_after_the_last_block_decides_the_run(in_line, data_of, tmp_path):
    overrides = [
        "benchmark.schedule.last_epoch=2",
        f"benchmark.targets.mean_absolute_error.value={SECOND_IS_THE_FIRST_TO_REACH}",
    ]
    released = tmp_path / "released"
    with job(data_of(toy.NAME), tmp_path / "out", 2, 1, *overrides, script=f"await {released}") as process:
        log = tmp_path / "out" / "mlperf.log"
        await_that(lambda: log.exists() and log.read_text().count('"eval_start"') == 2, process)
        assert events(tmp_path / "out", "run_stop") == []
        released.touch()
        ended = finish(process, SECONDS)
    assert ended.code == 0, ended.errors
    assert events(tmp_path / "out", "eval_error") == in_line[:2]
    assert events(tmp_path / "out", "run_stop") == [(None, 2, "success")]


@pytest.mark.parametrize(("script", "reason"), [("raise", "second evaluation fails"), ("broken data", "are broken")])
def test_an_evaluation_rank_that_fails_ends_the_job_and_is_named(script, reason, data_of, tmp_path):
    with job(data_of(toy.NAME), tmp_path / "out", 2, 1, *ENDLESS, script=script) as process:
        ended = finish(process, SECONDS)
    assert ended.code == ERROR_OF_DATA, ended.errors
    message = the_message(ended)
    assert "rank 2, which evaluates" in message
    assert reason in message
    assert_closed_as_aborted(tmp_path / "out" / "mlperf.log")


def test_sigterm_ends_ranks_of_both_roles_with_a_checkpoint(data_of, tmp_path):
    output = tmp_path / "out"
    with job(data_of(toy.NAME), output, 2, 1, *ENDLESS, script="score") as process:
        log = output / "mlperf.log"
        await_that(is_training(output), process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process, SECONDS)
    assert ended.code == INTERRUPTED, ended.errors
    assert "stopped by a signal at step" in the_message(ended)
    assert_closed_as_aborted(log)
    assert list((output / "checkpoints").glob("step_*/rank_1.pt"))


@contextlib.contextmanager
def stopped_while_evaluated(data: Path, output: Path, target: float) -> Iterator[Process]:
    """A run that got SIGTERM and has written a checkpoint before any evaluation ended; they go on from here."""
    overrides = [*ENDLESS, f"benchmark.targets.mean_absolute_error.value={target}"]
    released = output.with_name("released")
    with job(data, output, 2, 1, *overrides, script=f"await {released}") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and "eval_start" in log.read_text(), process)
        process.send_signal(signal.SIGTERM)
        await_that(lambda: list((output / "checkpoints").glob("step_*")) != [], process)
        released.touch()
        yield process


def test_evaluations_that_have_begun_are_scored_after_sigterm(data_of, tmp_path):
    output = tmp_path / "out"
    with stopped_while_evaluated(data_of(toy.NAME), output, target=0) as process:
        ended = finish(process, SECONDS)
    assert ended.code == INTERRUPTED, ended.errors
    begun, scores = events(output, "eval_start"), events(output, "eval_error")
    assert [epoch for _, epoch, _ in scores] == [epoch for _, epoch, _ in begun]
    (saved,) = (output / "checkpoints").glob("step_*")
    progress = torch.load(saved / "rank_0.pt", weights_only=True)["progress"]
    assert [score["mean_absolute_error"] for _, score in progress["history"]] == [score for score, _, _ in scores]
    assert progress["unscored"] == 0
    assert_closed_as_aborted(output / "mlperf.log")


def test_a_passing_score_after_sigterm_ends_the_run_as_a_success(in_line, data_of, tmp_path):
    output = tmp_path / "out"
    with stopped_while_evaluated(data_of(toy.NAME), output, target=largest_error(1)) as process:
        ended = finish(process, SECONDS)
    assert ended.code == 0, ended.errors
    assert events(output, "eval_error") == in_line[:1]
    assert events(output, "run_stop") == [(None, 1, "success")]


def test_evaluation_ranks_end_when_a_training_rank_is_killed(data_of, tmp_path):
    output = tmp_path / "out"
    with job(data_of(toy.NAME), output, 2, 1, *ENDLESS, script="score") as process:
        await_that(is_training(output), process)
        family = descendants(process.pid)
        rank_process(process.pid, 1).kill()
        ended = finish(process, SECONDS)
        _, alive = psutil.wait_procs(family, timeout=60)
    assert ended.code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in the_message(ended)
    assert not alive
