"""Inline evaluation: rank 0 scores, and sends the metrics or its failure to the other ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed import job_store
from common.distributed.faults import PeerFailed, lost_peer
from common.distributed.layout import Layout
from common.errors import DataError
from common.evaluation.inline import InlineEvaluation

WEIGHTS = Weights({"w": torch.zeros(1)})
METRICS = {"accuracy": 1 / 3, "loss": math.pi, "samples": 24_781.0}


class Scores(Scorer):
    """A scorer that records its calls."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.asked: list[object] = []

    def warm_up(self) -> None:
        self.asked.append("warm-up")

    def open_data(self, root: Path) -> None:
        self.asked.append(root)

    def score(self, predictions: Predictions) -> dict[str, float]:
        self.asked.append(predictions)
        if self.fails:
            raise DataError("no ground truth")
        return METRICS


class Predicting(Evaluation):
    """An evaluation in which only rank 0 has predictions."""

    def __init__(self, rank: int, fails: bool) -> None:
        self.scorer = Scores(fails)
        self.predictions = Predictions({"rank": rank}) if rank == 0 else None

    def open_data(self, root: Path) -> None:
        pass

    def predict(self, weights: Weights) -> Predictions | None:
        return self.predictions


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of rank 0; the other ranks receive the last one."""
    found: list[str] = []

    def from_rank(sender: int, name: str, value: str, timeout: object) -> str:
        assert sender == 6
        if value or not found:
            found.append(value)
        return found[-1]

    monkeypatch.setattr(job_store, "from_rank", from_rank)
    return found


def evaluation(rank: int, fails: bool = False) -> tuple[InlineEvaluation, Scores]:
    """The evaluation on a rank of two, whose rank 0 is the job's rank 6, with its data open; and its scorer."""
    made = Predicting(rank, fails)
    evaluations = InlineEvaluation(made, Layout({"dp": 2}, rank), first_rank=6)
    evaluations.open_data(Path("data"))
    return evaluations, made.scorer


def test_only_rank_0_scores_and_the_others_receive_every_digit(sent):
    first, scorer = evaluation(0)
    first.submit(WEIGHTS, 16)
    assert scorer.asked == [Path("data"), Predictions({"rank": 0})]
    other, idle = evaluation(1)
    other.submit(WEIGHTS, 16)
    assert idle.asked == []
    for evaluations in (first, other):
        (score,) = evaluations.poll()
        assert (score.samples, score.values) == (16, METRICS)
        assert score.seconds == score.waited_seconds


def test_a_failure_of_rank_0_ends_the_other_ranks(sent):
    first, _ = evaluation(0, fails=True)
    with pytest.raises(DataError, match="no ground truth"):
        first.submit(WEIGHTS, 16)
    assert sent == [""]
    other, _ = evaluation(1)
    with pytest.raises(PeerFailed) as caught:
        other.submit(WEIGHTS, 16)
    assert lost_peer(caught.value, 1) is not None
    assert lost_peer(RuntimeError(str(caught.value)), 1) is None


def test_only_the_scorer_of_rank_0_is_warmed_up(sent):
    for rank, asked in ((0, ["warm-up"]), (1, [])):
        made = Predicting(rank, fails=False)
        InlineEvaluation(made, Layout({"dp": 2}, rank), first_rank=6).prepare(lambda: WEIGHTS)
        assert made.scorer.asked == asked
