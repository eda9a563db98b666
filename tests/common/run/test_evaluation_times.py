"""Evaluation ranks: how long training waits for them, and in which order scores are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.config.schema import BenchmarkConfig, TargetConfig
from common.contract.evaluation import Point, Score, Weights
from common.distributed.layout import Layout
from common.errors import DataError
from common.evaluation import ranks
from common.evaluation.ranks import RankedEvaluation, ScoreMessage
from common.run.scoring import EvaluationPoints
from tests.stopped_clock import Clock

WEIGHTS = Weights({"w": torch.zeros(1)})


class Sender:
    """A sender whose transfers take the given seconds."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self.clock, self.seconds = clock, seconds

    def publish(self, index: int, samples: int, weights: object) -> None:
        self.clock.sleep(self.seconds[index])

    def check(self) -> None:
        pass


class Receiver:
    """A receiver with messages that have arrived, and messages that arrive after some seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.there: list[ScoreMessage] = []
        self.later: list[tuple[float, ScoreMessage]] = []

    def collect(self) -> list[ScoreMessage]:
        messages, self.there = self.there, []
        return messages

    def next(self) -> ScoreMessage:
        if self.there:
            return self.there.pop(0)
        seconds, message = self.later.pop(0)
        self.clock.sleep(seconds)
        return message


def message(samples: int, value: float | None, seconds: float = 5.0) -> ScoreMessage:
    """A message with an accuracy, or without a score."""
    return ScoreMessage(samples, None if value is None else {"accuracy": value}, seconds, time_ms=1000 + samples)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ranks, "time", made)
    return made


def evaluation(clock: Clock, publishing: list[float]) -> tuple[RankedEvaluation, Receiver]:
    made = RankedEvaluation(Layout(), 1, 1)
    receiver = Receiver(clock)
    made._sender, made._score_receiver = Sender(clock, publishing), receiver  # type: ignore[assignment]
    return made, receiver


def test_an_evaluation_without_waits_is_hidden(clock):
    made, receiver = evaluation(clock, [0.0])
    made.submit(WEIGHTS, 64)
    assert made.poll() == []
    receiver.there.append(message(64, 0.5, seconds=5.0))
    (score,) = made.poll()
    assert score == Score(64, {"accuracy": 0.5}, 1064, seconds=5.0, waited_seconds=0.0)
    assert score.hidden_seconds == 5.0


def test_the_wait_for_an_earlier_transfer_is_exposed(clock):
    made, receiver = evaluation(clock, [0.0, 3.0])
    made.submit(WEIGHTS, 64)
    made.submit(WEIGHTS, 128)
    receiver.there += [message(64, 0.5), message(128, 0.6, seconds=5.0)]
    assert [(score.waited_seconds, score.hidden_seconds) for score in made.poll()] == [(0.0, 5.0), (3.0, 2.0)]


def test_the_wait_after_the_last_block_is_exposed(clock):
    made, receiver = evaluation(clock, [0.0, 0.0])
    made.submit(WEIGHTS, 64)
    made.submit(WEIGHTS, 128)
    receiver.later += [(2.0, message(64, 0.5)), (4.0, message(128, 0.6))]
    assert [score.waited_seconds for score in made.finish()] == [2.0, 4.0]


def test_scores_in_the_wrong_order_are_an_error(clock):
    made, receiver = evaluation(clock, [0.0, 0.0])
    made.submit(WEIGHTS, 64)
    receiver.there.append(message(128, 0.5))
    with pytest.raises(RuntimeError, match="128 samples came, the next one is of 64"):
        made.poll()


def test_a_signal_at_the_evaluation_ranks_asks_to_stop_and_loses_no_score(clock):
    made, receiver = evaluation(clock, [0.0, 0.0])
    made.submit(WEIGHTS, 64)
    made.submit(WEIGHTS, 128)
    receiver.there += [message(64, None), message(64, 0.5), message(128, None)]
    assert [score.samples for score in made.poll()] == [64]
    assert made.interrupted
    receiver.later.append((1.0, message(128, 0.6)))
    assert [score.samples for score in made.finish()] == [128]


class Recorder:
    """Records every call as a tuple of name and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str):
        return lambda *arguments, **_: self.calls.append((name, *arguments))


class Scores:
    """Evaluations with the scores that a test sets."""

    def __init__(self, offline: bool = False) -> None:
        self.offline = offline
        self.named: list[Point] = []
        self.known: list[Score] = []
        self.awaited: list[Score] = []

    def submit(self, weights: Weights, samples: int) -> None:
        pass

    def trained(self, point: Point) -> None:
        self.named.append(point)

    def poll(self) -> list[Score]:
        known, self.known = self.known, []
        return known

    def finish(self, stopping: object) -> Iterator[Score]:
        while self.awaited:
            yield self.awaited.pop(0)
        if self.offline:
            return
        raise AssertionError("waits for more scores than can come")


def points_of(scores: Scores) -> tuple[EvaluationPoints, Scores, Recorder]:
    benchmark = BenchmarkConfig(
        "resnet", "", {"accuracy": TargetConfig(0.7, "higher")}, 100, 10, "synthetic", {}, {}, {}
    )  # fmt: skip
    events = Recorder()
    made = EvaluationPoints(scores, benchmark, events, Recorder(), Recorder())  # type: ignore[arg-type]
    return made, scores, events


@pytest.fixture
def points() -> tuple[EvaluationPoints, Scores, Recorder]:
    return points_of(Scores())


def point_of(samples: int, at: int, time_ms: int | None = None) -> Point:
    """A point with fewer real samples than nominal ones, as with packed sequences."""
    return Point(at, at, samples // 10, samples, samples - 1, time_ms)


def begin(points: EvaluationPoints, samples: int, at: int) -> None:
    points.begin(point_of(samples, at))
    points.submit(WEIGHTS, samples)


def score(samples: int, value: float) -> Score:
    return Score(samples, {"accuracy": value}, 1000 + samples)


def test_scores_are_logged_at_their_evaluation_points(points):
    made, scores, events = points
    begin(made, 100, at=1)
    begin(made, 200, at=2)
    scores.known = [score(100, 0.1), score(200, 0.2)]
    assert not made.poll()
    assert events.calls == [
        ("eval_start", 1, None), ("eval_start", 2, None),
        ("accuracy", {"accuracy": 0.1}, 1, 1100), ("eval_stop", 1, 1100),
        ("accuracy", {"accuracy": 0.2}, 2, 1200), ("eval_stop", 2, 1200),
    ]  # fmt: skip
    assert made.history == ((99, {"accuracy": 0.1}), (199, {"accuracy": 0.2}))


def test_an_early_score_is_recorded_once_its_evaluation_has_begun(points):
    made, scores, events = points
    begin(made, 100, at=1)
    made.submit(WEIGHTS, 200)
    scores.known = [score(100, 0.1), score(200, 0.9)]
    assert not made.poll()
    assert made.history == ((99, {"accuracy": 0.1}),)
    made.begin(point_of(200, 2, 1150))
    assert made.poll()
    assert events.calls[3:] == [
        ("eval_start", 2, 1150),
        ("accuracy", {"accuracy": 0.9}, 2, 1200),
        ("eval_stop", 2, 1200),
    ]


def test_after_a_passing_score_no_other_is_recorded(points):
    made, scores, events = points
    for at in (1, 2, 3):
        begin(made, 100 * at, at)
    scores.known = [score(100, 0.7), score(200, 0.9)]
    assert made.poll()
    scores.known = [score(300, 0.1)]
    assert made.poll()
    assert made.passed == (replace(score(100, 0.7), samples=99), 1)
    assert [call for call in events.calls if call[0] == "accuracy"] == [("accuracy", {"accuracy": 0.7}, 1, 1100)]
    assert made.history == ((99, {"accuracy": 0.7}),)


def test_after_a_passing_score_no_evaluation_can_fail_the_run(points):
    made, scores, _ = points
    begin(made, 100, at=1)
    scores.known = [score(100, 0.8)]
    assert made.poll()
    del scores.known
    assert made.poll()


def test_finish_does_not_wait_for_scores_after_a_passing_one(points):
    made, scores, _ = points
    begin(made, 100, at=1)
    begin(made, 200, at=2)
    scores.awaited = [score(100, 0.8)]
    assert made.finish()


def test_a_score_of_a_wrong_number_of_samples_is_an_error(points):
    made, scores, _ = points
    begin(made, 100, at=1)
    scores.known = [Score(100, {"accuracy": 0.1, "eval_samples": 9}, 1100)]
    with pytest.raises(DataError, match="9 samples were evaluated, but the recipe is for 10 of synthetic data"):
        made.poll()


def offline_score(number: int, value: float) -> Score:
    point = point_of(100 * number, number, 1000 * number)
    return Score(point.samples, {"accuracy": value}, 1000 * number, 5.0, 0.0, point, (9000 + number, 9100 + number))


def test_offline_the_first_passing_checkpoint_of_the_run_counts_in_any_order_of_scoring():
    made, scores, events = points_of(Scores(offline=True))
    for number in (1, 2, 3):
        made.begin(point_of(100 * number, number, 1000 * number))
    assert [point.time_ms for point in scores.named] == [1000, 2000, 3000]
    scores.known = [offline_score(3, 0.9)]
    assert made.poll()
    scores.awaited = [offline_score(2, 0.8), offline_score(1, 0.1)]
    assert made.finish()
    assert events.calls == []
    ending = made.ending()
    assert (ending[0].time_ms, ending[0].samples, ending[1]) == (2000, 199, 2)
    made.log_checkpoints()
    assert events.calls == [
        call
        for number, value in ((3, 0.9), (2, 0.8), (1, 0.1))
        for call in (
            ("eval_start", number, 9000 + number),
            ("accuracy", {"accuracy": value}, number, 9100 + number),
            ("eval_stop", number, 9100 + number),
        )
    ]


def test_offline_a_run_without_a_passing_checkpoint_ends_with_the_last_one():
    made, scores, _ = points_of(Scores(offline=True))
    scores.awaited = [offline_score(2, 0.2), offline_score(3, 0.3)]
    assert not made.finish()
    ending = made.ending()
    assert ending[0].time_ms == 3000
