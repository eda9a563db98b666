"""Scoring in the background: what it scores, what training waits for, and what ends it."""

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
from common.evaluation.background import MOST_OWED, BackgroundEvaluation
from common.evaluation.hand_over import ALIGNMENT, pack, unpack
from common.evaluation.scorer_process import ScorerProcess
from common.evaluation.scorer_service import ScoreAnswer
from tests.common.evaluation.scripted_scorers import AsPredicted, Witness

WEIGHTS = Weights({"w": torch.zeros(1)})


# The hand-over.


def test_predictions_arrive_as_they_were():
    numbers = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    values = {
        "rows": numbers,
        "turned": np.asfortranarray(numbers),
        "every other": numbers[:, ::2],
        "none": np.zeros((0, 7), dtype=np.int64),
        "nested": [{"mask": np.array([True, False])}, "text", 1.5],
        "odd": np.arange(ALIGNMENT + 1, dtype=np.uint8),
    }
    descriptor, sizes = pack(Predictions(values))
    values["rows"] = numbers + 1  # what was packed is packed
    found = unpack(descriptor, sizes).values
    os.close(descriptor)
    expected = {**values, "rows": numbers}
    assert found.keys() == expected.keys()
    for name in ("rows", "turned", "every other", "none", "odd"):
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name])
        assert found[name].flags.writeable
    np.testing.assert_array_equal(found["nested"][0]["mask"], [True, False])
    assert found["nested"][1:] == ["text", 1.5]


def test_who_predicted_may_change_arrays_once_they_are_handed_over():
    numbers = np.arange(1000.0)
    descriptor, sizes = pack(Predictions({"numbers": numbers}))
    numbers[:] = 0
    found = unpack(descriptor, sizes).values["numbers"]
    found[0] = 7
    os.close(descriptor)
    assert found[1:].tolist() == list(range(1, 1000))
    assert numbers[0] == 0


# The process.


@pytest.fixture
def process() -> Iterator[ScorerProcess]:
    """A process that scores, of Python's own making."""
    with ScorerProcess(threads=3, timeout_seconds=300) as made:
        made.keep_to(sorted(os.sched_getaffinity(0))[:1])
        yield made


def scored(process: ScorerProcess) -> dict[str, float]:
    """The next score, whatever else is answered before it."""
    while True:
        judged = process.wait()
        if judged is not None:
            return judged.values


def test_what_scores_has_its_data_once_and_its_own_cores_and_no_gpu_and_outlives_signals(process, tmp_path):
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
    assert process.owes == 0
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


def test_errors_arrive_and_the_end_of_the_process_is_told_with_how_it_ended(process):
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


# A process that only a test's clock runs in.


class Clock:
    """A clock that goes on only when somebody waits."""

    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Line:
    """A connection on which nothing comes; a look at it takes as long as it may."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def send(self, message: object) -> None:
        pass

    def poll(self, seconds: float) -> bool:
        self.clock.now += seconds
        return False

    def close(self) -> None:
        pass


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScorerProcess, Clock]]:
    """A process that never answers, with 10 seconds for an evaluation."""
    clock = Clock()
    with ScorerProcess(threads=1, timeout_seconds=10) as made:
        made._connection.close()
        monkeypatch.setattr(scorer_process, "time", clock)
        made._connection = Line(clock)  # type: ignore[assignment]
        monkeypatch.setattr(scorer_process, "send_handle", lambda *arguments: None)
        yield made, clock
        monkeypatch.undo()


def test_a_score_that_is_waited_for_too_long_is_an_error_that_names_the_process(silent):
    process, clock = silent
    process.submit(Predictions({}), samples=16)
    with pytest.raises(
        RankFailure, match=rf"process {process.pid}\) is stuck: scoring .* after 16 samples has taken more"
    ):
        process.wait()
    assert 60 <= clock.now <= 62


def test_a_score_that_never_comes_is_an_error_while_training_goes_on(silent):
    process, clock = silent
    process.submit(Predictions({}), samples=16)
    for _ in range(10):
        clock.now += 1
        assert process.poll() is None
    clock.now += 1
    with pytest.raises(RankFailure, match="is stuck"):
        process.poll()


def test_time_in_which_this_process_was_stopped_is_not_the_scorers(silent):
    process, clock = silent
    process.submit(Predictions({}), samples=16)
    clock.now += 3600
    assert process.poll() is None


# What training waits for.


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
    """A scorer's process whose answers come when a test says so; each takes 7 seconds of scoring."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.owed: deque[int] = deque()
        self.there = 0

    @property
    def owes(self) -> int:
        return len(self.owed)

    def submit(self, predictions: Predictions, samples: int) -> None:
        self.clock.now += 1
        self.owed.append(samples)

    def poll(self) -> ScoreAnswer | None:
        if not self.there:
            return None
        self.there -= 1
        return self._judged()

    def wait(self) -> ScoreAnswer:
        self.clock.now += 5
        return self._judged()

    def _judged(self) -> ScoreAnswer:
        samples = self.owed.popleft()
        return ScoreAnswer({"accuracy": samples / 100}, 7.0, 1000 + samples)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(background, "time", made)
    return made


def test_training_waits_for_the_prediction_and_its_hand_over_alone(clock):
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
    for number in range(1, MOST_OWED + 2):
        evaluations.submit(WEIGHTS, number)
    assert process.owes == MOST_OWED
    assert [score.samples for score in evaluations.poll()] == [1]
    process.there = MOST_OWED
    later = [score for _ in range(MOST_OWED) for score in evaluations.poll()]
    assert [score.samples for score in later] == list(range(2, MOST_OWED + 2))
    assert [score.waited_seconds for score in later] == [3.0] * (MOST_OWED - 1) + [8.0]
    assert {score.seconds for score in later} == {10.0}


class LastWords(Scores):
    """After its first answer it is dead."""

    def _judged(self) -> ScoreAnswer:
        if len(self.owed) < 2:
            raise RankFailure("the scorer is dead")
        return super()._judged()


def test_a_score_that_came_before_a_failure_is_told_before_it(clock):
    for tell in (lambda made: made.poll(), lambda made: [next(made.finish())]):
        process = LastWords(clock)
        evaluations = BackgroundEvaluation(Predicted(clock), process)  # type: ignore[arg-type]
        evaluations.submit(WEIGHTS, 16)
        evaluations.submit(WEIGHTS, 32)
        process.there = 2
        assert [score.samples for score in tell(evaluations)] == [16]
        with pytest.raises(RankFailure, match="is dead"):
            tell(evaluations)


def test_ranks_without_the_process_predict_and_know_no_score(clock):
    evaluations = BackgroundEvaluation(Predicted(clock), None)
    evaluations.submit(WEIGHTS, 16)
    assert clock.now == 52.0
    assert (evaluations.poll(), list(evaluations.finish())) == ([], [])
