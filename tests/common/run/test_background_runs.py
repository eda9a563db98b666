"""Whole runs with background scoring: the same decision as with inline scoring, and failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from common import cli
from common.config.composition import compose
from common.errors import ConfigError
from common.mlperf.verdict import judge
from common.run import start
from tests import toy
from tests.command_line import (
    ENDLESS,
    Process,
    assert_closed_as_aborted,
    await_that,
    descendants,
    finish,
    logged,
    rank_process,
    ranked,
    started,
    the_message,
    training,
)
from tests.common.run.scripted_evaluation import largest_error
from tests.conftest import SECONDS, suite

BACKGROUND = ["evaluation.scoring=background", "evaluation.scorer_threads=1"]
ERROR_OF_DATA, RANK_FAILURE, INTERRUPTED = 3, 7, 143
END_SECONDS = 60  # within which a process that was killed is gone
STEPS_OF_A_BLOCK = 16


@contextlib.contextmanager
def job(data: Path, output: Path, ranks: int, *overrides: str, deed: str) -> Iterator[Process]:
    """A run of the toy on so many ranks that is scored as ``deed`` says."""
    command = ranked("tests.common.run.scripted_evaluation", ranks, f"scorer {deed}")
    with started(training(data, output, f"scale.gpus_per_node={ranks}", *overrides), command=command) as process:
        yield process


def scorer_of(launcher: int) -> psutil.Process:
    """The one process of a run that has a session of its own."""
    (found,) = [child for child in descendants(launcher) if os.getsid(child.pid) == child.pid]
    return found


def events(log: Path, *keys: str) -> list[tuple[str, object, int | None, str | None]]:
    """Key, value, epoch and status of the events of ``keys`` in a log, in order."""
    epochs = ("epoch_num", "first_epoch_num")
    return [
        (
            line["key"],
            line["value"],
            next((line["metadata"][name] for name in epochs if name in line["metadata"]), None),
            line["metadata"].get("status"),
        )
        for line in logged(log, *keys)
    ]


def steps(output: Path, rank: int) -> list[int]:
    """The steps that a rank's metrics tell of."""
    return [json.loads(line)["step"] for line in (output / f"metrics_rank{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def in_line(data_of, tmp_path_factory) -> dict[int, Path]:
    """The toy's own runs to its target by number of ranks, scored in line."""
    root = tmp_path_factory.mktemp("in line")
    for ranks in (1, 2):
        ended = suite(*training(data_of(toy.NAME), root / str(ranks), f"scale.gpus_per_node={ranks}"))
        assert ended.code == 0, ended.errors
    return {ranks: root / str(ranks) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_background_scoring_ends_a_run_as_inline_scoring_does(ranks, in_line, data_of, tmp_path):
    ended = suite(*training(data_of(toy.NAME), tmp_path, f"scale.gpus_per_node={ranks}", *BACKGROUND))
    assert ended.code == 0, ended.errors
    log, expected = tmp_path / "mlperf.log", in_line[ranks] / "mlperf.log"
    for keys in (("eval_start",), ("eval_error", "eval_stop"), ("run_stop",)):
        assert events(log, *keys)[: len(events(expected, *keys))] == events(expected, *keys)
    assert len(events(log, "eval_error")) == len(events(expected, "eval_error")) >= 3
    of_training = ("block_start", "block_stop", "epoch_start", "epoch_stop")
    trained = events(expected, *of_training)
    assert events(log, *of_training)[: len(trained)] == trained
    verdict = judge(log)
    assert verdict.kind == "format", verdict.reasons
    records = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert all(record["waited_seconds"] > 0 for record in records)
    assert "Traceback" not in ended.errors


def test_all_ranks_stop_at_the_same_step_after_a_score_during_training(data_of, tmp_path):
    output, released = tmp_path / "out", tmp_path / "released"
    overrides = [*ENDLESS, *BACKGROUND, f"benchmark.targets.mean_absolute_error.value={largest_error(1)}"]
    with job(data_of(toy.NAME), output, 2, *overrides, deed=f"await {released}") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and log.read_text().count('"eval_start"') >= 2, process)
        assert events(log, "eval_error", "run_stop") == []
        released.touch()
        ended = finish(process, SECONDS)
    assert ended.code == 0, ended.errors
    assert events(log, "run_stop") == [("run_stop", None, 1, "success")]
    assert [epoch for _, _, epoch, _ in events(log, "eval_error")] == [1]
    assert steps(output, 0) == steps(output, 1)
    assert len(steps(output, 0)) > 2 * STEPS_OF_A_BLOCK


def test_a_score_after_the_last_block_decides_the_run(data_of, tmp_path):
    output, released = tmp_path / "out", tmp_path / "released"
    overrides = [
        *BACKGROUND,
        "benchmark.schedule.last_epoch=2",
        f"benchmark.targets.mean_absolute_error.value={largest_error(2)}",
    ]
    with job(data_of(toy.NAME), output, 2, *overrides, deed=f"await {released}") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and log.read_text().count('"eval_start"') == 2, process)
        released.touch()
        ended = finish(process, SECONDS)
    assert ended.code == 0, ended.errors
    assert events(log, "run_stop") == [("run_stop", None, 2, "success")]
    assert steps(output, 0) == steps(output, 1) == list(range(1, 2 * STEPS_OF_A_BLOCK + 1))


def test_signals_to_every_process_of_a_job_lose_no_score(data_of, tmp_path):
    output, released = tmp_path / "out", tmp_path / "released"
    with job(data_of(toy.NAME), output, 2, *ENDLESS, *BACKGROUND, deed=f"await {released}") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and '"eval_start"' in log.read_text(), process)
        scorer = scorer_of(process.pid)
        for signum in (signal.SIGINT, signal.SIGTERM):
            scorer.send_signal(signum)
        process.send_signal(signal.SIGTERM)
        await_that(lambda: list((output / "checkpoints").glob("step_*")) != [], process)
        released.touch()
        ended = finish(process, SECONDS)
    assert ended.code == INTERRUPTED, ended.errors
    assert "stopped by a signal at step" in the_message(ended)
    assert_closed_as_aborted(log)
    begun, scores = events(log, "eval_start"), events(log, "eval_error")
    assert [epoch for _, _, epoch, _ in scores] == [epoch for _, _, epoch, _ in begun]
    (saved,) = (output / "checkpoints").glob("step_*")
    progress = torch.load(saved / "rank_0.pt", weights_only=True)["progress"]
    assert [score["mean_absolute_error"] for _, score in progress["history"]] == [score for _, score, _, _ in scores]
    assert progress["unscored"] == 0


def test_a_resumed_run_has_the_scores_of_an_uninterrupted_one(in_line, data_of, tmp_path):
    arguments = training(data_of(toy.NAME), tmp_path / "cut", *BACKGROUND)
    cut = suite(*arguments, "checkpoint_every=20", "benchmark.schedule.last_epoch=2")
    assert cut.code == 10, cut.errors
    saved = tmp_path / "cut" / "checkpoints" / "step_00000020"
    arguments = training(data_of(toy.NAME), tmp_path / "resumed", *BACKGROUND)
    resumed = suite(*arguments, f"resume={saved}")
    assert resumed.code == 0, resumed.errors
    log = tmp_path / "resumed" / "mlperf_resumed_at_20.log"
    assert events(log, "eval_error") == events(in_line[1] / "mlperf.log", "eval_error")[1:]


@pytest.mark.parametrize(
    ("deed", "ranks", "overrides", "code", "reason"),
    [
        ("raise", 2, ENDLESS, ERROR_OF_DATA, "evaluation after 512 samples: the second evaluation cannot be scored"),
        ("broken data", 2, ENDLESS, ERROR_OF_DATA, "loading the ground truth: the ground truth is broken"),
        (
            "die", 2, ENDLESS, RANK_FAILURE,
            "was killed by SIGKILL; not by the kernel for want of memory: ",
        ),
        (
            "hang", 1, ["benchmark.schedule.last_epoch=2", ENDLESS[1], "timeout_seconds=4"], RANK_FAILURE,
            "is stuck: scoring the evaluation after 512 samples has taken more than 4 s",
        ),
    ],
    ids=["raise", "broken data", "die", "hang"],
)  # fmt: skip
def test_a_scorer_that_fails_ends_the_job_with_one_message(deed, ranks, overrides, code, reason, data_of, tmp_path):
    output = tmp_path / "out"
    with job(data_of(toy.NAME), output, ranks, *overrides, *BACKGROUND, deed=deed) as process:
        await_that(lambda: (output / "mlperf.log").exists(), process)
        family = descendants(process.pid)
        ended = finish(process, SECONDS)
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    assert ended.code == code, ended.errors
    assert reason in the_message(ended)
    assert_closed_as_aborted(output / "mlperf.log")
    assert not alive


def test_an_error_of_inline_scoring_ends_all_ranks_with_one_message(data_of, tmp_path):
    output = tmp_path / "out"
    with job(data_of(toy.NAME), output, 2, *ENDLESS, deed="raise") as process:
        ended = finish(process, SECONDS)
    assert ended.code == ERROR_OF_DATA, ended.errors
    assert "the second evaluation cannot be scored" in the_message(ended)
    assert_closed_as_aborted(output / "mlperf.log")


def test_the_scorer_ends_when_rank_0_is_killed(data_of, tmp_path):
    output, never = tmp_path / "out", tmp_path / "never"
    with job(data_of(toy.NAME), output, 2, *ENDLESS, *BACKGROUND, deed=f"await {never}") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and '"eval_start"' in log.read_text(), process)
        family = descendants(process.pid)
        assert scorer_of(process.pid) in family
        rank_process(process.pid, 0).kill()
        ended = finish(process, SECONDS)
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    assert ended.code == 128 + signal.SIGKILL
    assert "rank 0 was killed by SIGKILL" in the_message(ended)
    assert not alive


class Noted:
    """A scorer process that adds what happens to it to a list of events."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __call__(self, threads: int, timeout_seconds: float) -> Noted:
        self.events.append(f"scorer of {threads} threads")
        return self

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append("scorer ends")

    def keep_to(self, cpus: object) -> None:
        self.events.append("scorer is bound")


def order_of_start(monkeypatch: pytest.MonkeyPatch, data: Path, rank: int, *overrides: str) -> list[str]:
    """Events of one of two ranks, from its start to its end."""
    found: list[str] = []

    def picked(*arguments: object) -> torch.device:
        found.append("device")
        return torch.device("meta")  # for which nothing is set in this process

    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(start, "ScorerProcess", Noted(found))
    monkeypatch.setattr(start, "bind_rank", lambda *arguments: found.append("rank is bound"))
    monkeypatch.setattr(start, "spare_cpus", lambda *arguments: frozenset())
    monkeypatch.setattr(start, "pick_device", picked)
    monkeypatch.setattr(start, "initialise", lambda *arguments: found.append("process group"))
    monkeypatch.setattr(start, "shutdown", lambda: found.append("process group ends"))

    def work(begun: start.Start) -> int:
        found.append("work with a scorer" if begun.scorer is not None else "work")
        return 0

    with toy.known():
        given = [f"benchmark={toy.NAME}", "scale=test", "scale.gpus_per_node=2", f"data_dir={data}", *overrides]
        assert start.on_ranks("train", [], compose(given), cli.workload_class, work) == 0
    return found


def test_the_scorer_starts_before_the_device_and_the_process_group(tmp_path, monkeypatch):
    found = order_of_start(monkeypatch, tmp_path, 0, *BACKGROUND)
    assert found == [
        "scorer of 1 threads", "rank is bound", "scorer is bound", "device", "process group", "work with a scorer",
        "process group ends", "scorer ends",
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "overrides"), [(1, BACKGROUND), (0, [])])
def test_only_rank_0_with_background_scoring_starts_a_scorer(rank, overrides, tmp_path, monkeypatch):
    expected = ["rank is bound", "device", "process group", "work", "process group ends"]
    assert order_of_start(monkeypatch, tmp_path, rank, *overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["scale.gpus_per_node=2", "evaluation.ranks=1", *BACKGROUND],
            "scoring=background: with evaluation.ranks=1 these",
        ),
        (["evaluation.scorer_threads=0"], "scorer_threads=0: at least 1 thread scores"),
    ],
    ids=["evaluation ranks", "no thread"],
)
def test_impossible_settings_of_background_scoring_are_refused(overrides, message):
    with toy.known(), pytest.raises(ConfigError, match=message):
        cli.load(compose([f"benchmark={toy.NAME}", "scale=test", *overrides]))
