"""Background scoring: the scorer process, its failures, and the waits of training."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from common.contract.evaluation import Evaluation, Predictions, Score, Scorer, Weights
from common.errors import DataError, RankFailure
from common.evaluation import background, scorer_process
from common.evaluation.background import MOST_PENDING, BackgroundEvaluation
from common.evaluation.scorer_process import ScorerProcess
from common.evaluation.scorer_service import ScoreAnswer
from tests.common.evaluation.scripted_scorers import AsPredicted, Witness
from tests.stopped_clock import Clock

WEIGHTS = Weights({"w": torch.zeros(1)})


@pytest.fixture
def process() -> Iterator[ScorerProcess]:
    """A running scorer process."""
    with ScorerProcess(threads=3, timeout_seconds=300) as made:
        made.keep_to(sorted(os.sched_getaffinity(0))[:1])
        yield made


def scored(process: ScorerProcess) -> dict[str, float]:
    """The next score; other answers before it are ignored."""
    while True:
        judged = process.wait()
        if judged is not None:
            return judged.values


def test_the_process_opens_data_once_has_own_cores_and_no_gpu_and_ignores_signals(process, tmp_path):
    truth = np.arange(100_000.0)
    np.savetxt(tmp_path / "truth.txt", truth)
    process.begin(Witness(signal.SIGINT, signal.SIGTERM))
    process.open_data(tmp_path)
    for wrong in (0, 5):
        found = truth.copy()
        found[:wrong] = -1
        process.submit(Predictions({"found": found}), samples=16)
    first, second = scored(process), scored(process)
    assert (first["agreeing"], second["agreeing"]) == (100_000, 99_995)
    assert process.pending == 0
    same = {
        "warmed up": 1,
        "opened": 1,
        "process": process.pid,
        "session": process.pid,
        "threads": 3,
        "cpus": 1,
        "gpus": 0,
        "passive": 1,
    }
    for values in (first, second):
        assert {name: values[name] for name in same} == same
    process.close()
    assert not psutil.pid_exists(process.pid)


def test_errors_of_the_scorer_and_the_exit_code_of_the_process_are_reported(process):
    process.begin(AsPredicted("raise"))
    process.submit(Predictions({"error": 0.5}), samples=16)
    process.submit(Predictions({"error": 0.4}), samples=32)
    assert scored(process) == {"error": 0.5}
    with pytest.raises(DataError, match="scoring the evaluation after 32 samples: the second evaluation cannot be"):
        process.wait()
    process.begin(AsPredicted("bug"))
    assert process.wait() is None
    process.submit(Predictions({"error": 0.3}), samples=48)
    process.submit(Predictions({"error": 0.2}), samples=64)
    assert scored(process) == {"error": 0.3}
    with pytest.raises(RuntimeError, match=r"(?s)scoring the evaluation after 64 .*Traceback.*0 divided by 0"):
        process.wait()
    process.begin(AsPredicted("exit 3"))
    process.submit(Predictions({}), samples=80)
    process.submit(Predictions({}), samples=96)
    assert scored(process) == {}
    with pytest.raises(
        RankFailure, match=rf"process {process.pid}\) ended with exit code 3, during: .* after 96 samples"
    ):
        process.wait()
    with pytest.raises(RankFailure, match="ended with exit code 3"):
        process.submit(Predictions({}), samples=112)


class SilentConnection:
    """A connection that receives nothing; ``poll`` waits for its whole time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def send(self, message: object) -> None:
        pass

    def poll(self, seconds: float) -> bool:
        self.clock.sleep(seconds)
        return False

    def close(self) -> None:
        pass


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScorerProcess, Clock]]:
    """A process that never answers, with 10 seconds for an evaluation."""
    clock = Clock(50.0)
    with ScorerProcess(threads=1, timeout_seconds=10) as made:
        made._connection.close()
        monkeypatch.setattr(scorer_process, "time", clock)
        made._connection = SilentConnection(clock)  # type: ignore[assignment]
        monkeypatch.setattr(scorer_process, "send_handle", lambda *arguments: None)
        yield made, clock
        monkeypatch.undo()


def test_a_wait_for_a_score_beyond_the_time_limit_is_an_error(silent):
    process, clock = silent
    process.submit(Predictions({}), samples=16)
    with pytest.raises(
        RankFailure, match=rf"process {process.pid}\) is stuck: scoring .* after 16 samples has taken more"
    ):
        process.wait()
    assert 60 <= clock.now <= 62


def test_a_missing_score_is_an_error_during_training(silent):
    process, clock = silent
    process.submit(Predictions({}), samples=16)
    for _ in range(10):
        clock.now += 1
        assert process.poll() is None
    clock.now += 1
    with pytest.raises(RankFailure, match="is stuck"):
        process.poll()


def test_time_in_which_this_process_was_stopped_does_not_count(silent):
    process, clock = silent
    process.submit(Predictions({}), samples=16)
    clock.now += 3600
    assert process.poll() is None


class Predicted(Evaluation):
    """Predicting takes 2 seconds."""

    def __init__(self, clock: Clock) -> None:
        self.scorer: Scorer = AsPredicted()
        self.clock = clock

    def open_data(self, root: Path) -> None:
        pass

    def predict(self, weights: Weights) -> Predictions | None:
        self.clock.now += 2
        return Predictions({})


class Scores:
    """A scorer process that has ``there`` answers, each after 7 seconds of scoring."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.unanswered: deque[int] = deque()
        self.there = 0

    @property
    def pending(self) -> int:
        return len(self.unanswered)

    def submit(self, predictions: Predictions, samples: int) -> None:
        self.clock.now += 1
        self.unanswered.append(samples)

    def poll(self) -> ScoreAnswer | None:
        if not self.there:
            return None
        self.there -= 1
        return self._judged()

    def wait(self) -> ScoreAnswer:
        self.clock.now += 5
        return self._judged()

    def _judged(self) -> ScoreAnswer:
        samples = self.unanswered.popleft()
        return ScoreAnswer({"accuracy": samples / 100}, 7.0, 1000 + samples)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(50.0)
    monkeypatch.setattr(background, "time", made)
    return made


def test_training_waits_only_for_the_prediction_and_its_transfer(clock):
    process = Scores(clock)
    evaluations = BackgroundEvaluation(Predicted(clock), process)  # type: ignore[arg-type]
    evaluations.submit(WEIGHTS, 16)
    assert evaluations.poll() == []
    process.there = 1
    (score,) = evaluations.poll()
    assert score == Score(16, {"accuracy": 0.16}, 1016, seconds=10.0, waited_seconds=3.0)
    assert score.hidden_seconds == 7.0


def test_after_the_last_block_training_waits_for_the_scores(clock):
    evaluations = BackgroundEvaluation(Predicted(clock), Scores(clock))  # type: ignore[arg-type]
    evaluations.submit(WEIGHTS, 16)
    evaluations.submit(WEIGHTS, 32)
    assert [(score.samples, score.waited_seconds) for score in evaluations.finish()] == [(16, 8.0), (32, 8.0)]


def test_training_waits_for_a_scorer_that_is_behind(clock):
    process = Scores(clock)
    evaluations = BackgroundEvaluation(Predicted(clock), process)  # type: ignore[arg-type]
    for number in range(1, MOST_PENDING + 2):
        evaluations.submit(WEIGHTS, number)
    assert process.pending == MOST_PENDING
    assert [score.samples for score in evaluations.poll()] == [1]
    process.there = MOST_PENDING
    later = [score for _ in range(MOST_PENDING) for score in evaluations.poll()]
    assert [score.samples for score in later] == list(range(2, MOST_PENDING + 2))
    assert [score.waited_seconds for score in later] == [3.0] * (MOST_PENDING - 1) + [8.0]
    assert {score.seconds for score in later} == {10.0}


class DyingScores(Scores):
    """A scorer process that dies after its first answer."""

    def _judged(self) -> ScoreAnswer:
        if len(self.unanswered) < 2:
            raise RankFailure("the scorer is dead")
        return super()._judged()


def test_a_score_before_a_failure_is_returned_before_it(clock):
    for arrived in (lambda made: made.poll(), lambda made: [next(made.finish())]):
        process = DyingScores(clock)
        evaluations = BackgroundEvaluation(Predicted(clock), process)  # type: ignore[arg-type]
        evaluations.submit(WEIGHTS, 16)
        evaluations.submit(WEIGHTS, 32)
        process.there = 2
        assert [score.samples for score in arrived(evaluations)] == [16]
        with pytest.raises(RankFailure, match="is dead"):
            arrived(evaluations)


def test_other_ranks_predict_and_receive_no_score(clock):
    evaluations = BackgroundEvaluation(Predicted(clock), None)
    evaluations.submit(WEIGHTS, 16)
    assert clock.now == 52.0
    assert (evaluations.poll(), list(evaluations.finish())) == ([], [])
