"""Whole runs of MiniGo with ranks that only play, and runs that were stopped: the weights are those of one rank."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from benchmarks.minigo.records import CLOSED, generation_folder
from benchmarks.minigo.run_folder import RunFolder
from common.errors import RankFailure
from common.formats.safetensors_file import read_tensors
from tests.benchmarks.minigo.replayed_games import DAMAGE, FAIL
from tests.command_line import (
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
from tests.conftest import SECONDS, Finished, suite

INTERRUPTED, ERROR_OF_DATA, NOT_CONVERGED = 143, 3, 10
GENERATIONS = (5, 6, 7)
"""Generations of the models that the run of three blocks trains."""
OVERRIDES = ("benchmark.schedule.last_generation=3", "benchmark.targets.win_rate.value=1.5", "precision=fp64")
"""All checkpoints are scored, and none passes. In fp64, the order of sums changes the last bits only."""


def arguments(data: Path, output: Path, *overrides: str) -> list[str]:
    """The arguments of a run of three generations."""
    return training(data, output, *OVERRIDES, *overrides, benchmark="minigo")


@contextlib.contextmanager
def replaying(played: Path | str, data: Path, output: Path, ranks: int, *overrides: str) -> Iterator[Process]:
    """A run on ``ranks`` ranks, of which one only plays: it copies games of another run."""
    fixed = [f"scale.gpus_per_node={ranks}", "selfplay.ranks=1", "selfplay.training_ranks_play=false"]
    command = ranked("tests.benchmarks.minigo.replayed_games", ranks, str(played))
    with started(arguments(data, output, *fixed, *overrides), command=command) as process:
        yield process


def replayed(played: Path | str, data: Path, output: Path, ranks: int, *overrides: str) -> Finished:
    """The same, ended."""
    with replaying(played, data, output, ranks, *overrides) as process:
        return finish(process, SECONDS)


@pytest.fixture(scope="module")
def data(data_of) -> Path:
    return data_of("minigo")


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Path:
    """The output of one rank that plays and trains."""
    output = tmp_path_factory.mktemp("alone") / "out"
    ended = suite(*arguments(data, output))
    assert ended.code == NOT_CONVERGED, ended.errors
    return output


def model(output: Path, generation: int) -> dict[str, Tensor]:
    """The tensors of a model."""
    return read_tensors(RunFolder.below(output).models.path(generation), torch.device("cpu"))


def assert_same_models(output: Path, alone: Path) -> None:
    for generation in GENERATIONS:
        expected, found = model(alone, generation), model(output, generation)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=f"{name} of generation {generation}")


def test_ranks_that_train_play_and_evaluate_give_the_weights_and_scores_of_one_that_does_all(alone, data, tmp_path):
    ended = replayed(alone, data, tmp_path / "out", 3, "evaluation.ranks=1")
    assert ended.code == NOT_CONVERGED, ended.errors
    assert_same_models(tmp_path / "out", alone)
    assert scores(tmp_path / "out") == scores(alone)


def scores(output: Path) -> list[object]:
    """The win rates in the log."""
    found = [event["value"] for event in logged(output / "mlperf.log", "eval_accuracy")]
    assert len(found) == len(GENERATIONS)
    return found


@pytest.mark.slow
def test_two_training_ranks_give_the_weights_of_one_that_accumulates(alone, data, tmp_path):
    """Without the running statistics: one rank updates them with each micro-batch, two ranks average theirs."""
    ended = replayed(alone, data, tmp_path / "out", 3, "evaluation.by_command=true")
    assert ended.code == 0, ended.errors
    for generation in GENERATIONS:
        expected, found = model(alone, generation), model(tmp_path / "out", generation)
        trained = [name for name in expected if "running" not in name]
        assert len(trained) < len(expected)
        for name in trained:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-9)
    scored = suite("score", str(tmp_path / "out"), "device=cpu")  # on the two ranks that have trained
    assert scored.code == NOT_CONVERGED, scored.errors
    assert len(scores(tmp_path / "out")) == len(GENERATIONS)


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_waits_for_games_continues_with_the_same_weights(alone, data, tmp_path):
    output, none = tmp_path / "out", tmp_path / "none"
    folder = RunFolder.below(output)
    with replaying(none, data, output, 2) as process:
        await_that(folder.models.path(5).exists, process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process, SECONDS)
    assert ended.code == INTERRUPTED, ended.errors
    assert "stopped by a signal" in the_message(ended)
    assert_closed_as_aborted(output / "mlperf.log")
    (checkpoint,) = (output / "checkpoints").glob("step_*")
    elsewhere = replayed(alone, data, tmp_path / "other", 2, f"resume={checkpoint}")
    assert "000005.safetensors is missing: a run resumes with its models and games" in the_message(elsewhere)
    # Files of training that is lost, such as that of a run which was killed after its last checkpoint.
    folder.models.publish(9, {"lost": torch.zeros(1)})
    lost = generation_folder(folder.games, 9)
    lost.mkdir(parents=True)
    (lost / CLOSED).write_text("lost")
    ended = replayed(alone, data, output, 2, f"resume={checkpoint}")
    assert ended.code == NOT_CONVERGED, ended.errors
    assert_same_models(output, alone)
    assert folder.models.newest() == 7
    assert not lost.exists()


@pytest.mark.slow
def test_a_generation_that_passes_ends_the_run_while_the_next_games_are_played(data, tmp_path):
    """No game of the first model ends here, so that only its score can end the run, on both training ranks."""
    output = tmp_path / "out"
    ended = replayed(tmp_path / "none", data, output, 4, "evaluation.ranks=1", "benchmark.targets.win_rate.value=0.0")
    assert ended.code == 0, ended.errors
    assert RunFolder.below(output).models.newest() == 5
    assert [event["metadata"]["epoch_num"] for event in logged(output / "mlperf.log", "eval_accuracy")] == [1]
    (stop,) = logged(output / "mlperf.log", "run_stop")
    assert (stop["metadata"]["status"], stop["metadata"]["epoch_num"]) == ("success", 1)


def test_a_rank_that_plays_and_fails_ends_the_run_and_is_named(data, tmp_path):
    ended = replayed(FAIL, data, tmp_path / "out", 2)
    assert ended.code == ERROR_OF_DATA, ended.errors
    assert "rank 1, which plays: the games are broken" in the_message(ended)
    assert_closed_as_aborted(tmp_path / "out" / "mlperf.log")


def test_ranks_that_play_end_with_the_training_ranks_that_fail(data, tmp_path):
    ended = replayed(DAMAGE, data, tmp_path / "out", 2)
    assert ended.code == ERROR_OF_DATA, ended.errors
    assert "damaged.safetensors" in the_message(ended)
    assert_closed_as_aborted(tmp_path / "out" / "mlperf.log")


def worker_of(rank: int) -> psutil.Process:
    """Return the only self-play worker of the rank with this process id."""
    (worker,) = [child for child in descendants(rank) if "spawn_main" in " ".join(child.cmdline())]
    return worker


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_one_that_hangs_ends_the_run(data, tmp_path):
    output = tmp_path / "out"
    folder = RunFolder.below(output)
    overrides = ["scale.gpus_per_node=2", "selfplay.ranks=1", "selfplay.training_ranks_play=false"]
    overrides += ["benchmark.schedule.last_generation=1000", "timeout_seconds=30"]
    with started(arguments(data, output, *overrides)) as process:
        await_that(folder.models.path(5).exists, process)
        plays = rank_process(process.pid, 1).pid
        worker_of(plays).kill()
        await_that(lambda: any(folder.games.glob("*/play0-*-000-1-*")), process)
        played = max(int(path.parent.name) for path in folder.games.glob("*/play0-*-000-1-*"))
        await_that(folder.models.path(played + 1).exists, process)
        worker_of(plays).send_signal(signal.SIGSTOP)
        ended = finish(process, SECONDS)
    assert ended.code == RankFailure.exit_code, ended.errors
    assert "self-play worker 0 ended with exit code -9, and is replaced" in ended.errors
    assert "rank 1 makes no progress" in ended.errors
    assert "phase 'self-play'" in ended.errors
