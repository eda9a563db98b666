"""Scoring of checkpoints: rank 0 selects them and informs the other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.contract.evaluation import Evaluation, Point, Predictions, Scorer, Weights
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.faults import PeerFailed
from common.distributed.layout import Layout
from common.errors import CheckpointError, DataError, Interrupted
from common.evaluation.checkpoint_queue import Checkpoint, CheckpointScore
from common.evaluation.checkpoint_scoring import CheckpointScoring
from common.formats.safetensors_file import write_tensors


class Sum(Scorer):
    """The sum is the metric; a sum of 13 is an error."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        if predictions.values["sum"] == 13:
            raise DataError("no ground truth")
        return {"sum": predictions.values["sum"]}


class Summing(Evaluation):
    """Predicts the sum of the weights, and records its calls."""

    def __init__(self) -> None:
        self.scorer = Sum()
        self.opened: list[Path] = []
        self.seen: list[float] = []

    def open_data(self, root: Path) -> None:
        self.opened.append(root)

    def predict(self, weights: Weights) -> Predictions:
        self.seen.append(float(weights.tensors["w"].sum()))
        return Predictions({"sum": self.seen[-1]})


def checkpoints(folder: Path, *values: float) -> list[Checkpoint]:
    """Files with a weight of each value."""
    made = [Checkpoint.of(Point(n, n, n, n, n, 1000 * n)) for n in range(1, 1 + len(values))]
    for checkpoint, value in zip(made, values, strict=True):
        write_tensors(folder / checkpoint.file, {"w": torch.tensor([value])}, {})
    return made


def scoring_in(folder: Path, layout: Layout) -> tuple[CheckpointScoring, Summing]:
    evaluation = Summing()
    workload: Any = SimpleNamespace(evaluation=lambda layout: evaluation, tensor_splits=dict)
    made = CheckpointScoring(cast(Workload, workload), layout, folder)
    made.prepare()
    made.open_data(folder)
    return made, evaluation


def test_each_score_is_noted_before_the_next_checkpoint_is_chosen(tmp_path):
    made, evaluation = scoring_in(tmp_path, Layout())
    waiting, calls = checkpoints(tmp_path, 1.0, 2.0), []

    def choose() -> Checkpoint | None:
        calls.append("chosen")
        return waiting.pop(0) if waiting else None

    def note(checkpoint: Checkpoint, score: CheckpointScore) -> None:
        calls.append(score.values["sum"])

    found = list(made.scores(choose, note))
    assert calls == ["chosen", 1.0, "chosen", 2.0, "chosen"]
    assert [(checkpoint.point.number, score.values) for checkpoint, score in found if score] == [
        (1, {"sum": 1.0}), (2, {"sum": 2.0})
    ]  # fmt: skip
    assert all(
        score.file == checkpoint.file and score.began_ms <= score.ended_ms for checkpoint, score in found if score
    )
    assert evaluation.opened == [tmp_path]


def test_after_a_signal_the_current_score_is_noted(tmp_path):
    made, evaluation = scoring_in(tmp_path, Layout())
    waiting, noted = checkpoints(tmp_path, 1.0, 2.0), []
    scores = made.scores(lambda: waiting.pop(0), lambda *score: noted.append(score), lambda: bool(evaluation.seen))
    checkpoint, _ = next(scores)
    assert checkpoint.point.number == 1
    with pytest.raises(Interrupted):
        next(scores)
    assert len(noted) == 1
    assert evaluation.seen == [1.0]


def test_a_missing_checkpoint_is_named(tmp_path):
    made, _ = scoring_in(tmp_path, Layout())
    (checkpoint,) = checkpoints(tmp_path, 1.0)
    (tmp_path / checkpoint.file).unlink()
    with pytest.raises(CheckpointError, match=r"consumed_samples=1\.safetensors is gone, and was not scored"):
        list(made.scores(lambda: checkpoint, lambda *_: None))


def test_a_failure_of_rank_0_ends_the_other_ranks(tmp_path, monkeypatch):
    sent = []

    def from_rank(sender: int, name: str, value: str, timeout: object = None) -> str:
        sent.append(value)
        return value

    monkeypatch.setattr(job_store, "from_rank", from_rank)
    made, _ = scoring_in(tmp_path, Layout())
    waiting = checkpoints(tmp_path, 13.0)
    with pytest.raises(DataError, match="no ground truth"):
        list(made.scores(lambda: waiting.pop(0), lambda *_: None))
    chosen, failed = sent
    monkeypatch.setattr(job_store, "from_rank", lambda *_: failed)
    other, evaluation = scoring_in(tmp_path, Layout())
    monkeypatch.setattr(other, "_layout", SimpleNamespace(rank=1, device=torch.device("cpu")))
    with pytest.raises(PeerFailed):
        list(other.scores(lambda: None, lambda *_: None))
    assert evaluation.seen == []
    messages = iter([chosen, "no more"])
    monkeypatch.setattr(job_store, "from_rank", lambda *_: next(messages))
    assert [score for _, score in other.scores(lambda: None, lambda *_: None)] == [None]
    assert evaluation.seen == [13.0]
