"""What the bench of evaluations measures: as many pictures as asked for, each once, found in by a real network."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ssd300.workload import Ssd300Detection
from common.contract.evaluation import Predictions, Weights
from common.detection import evaluation_bench
from common.detection.evaluation import DetectionEvaluation


def test_a_source_has_every_picture_once_and_fills_the_last_batch_up() -> None:
    source = evaluation_bench.MadeUp({key: {"picture": torch.full((3,), -1)} for key in ("wide", "high")}, 7)
    pictures = [host.tensors["picture"].tolist() for host in source]
    assert len(source) == 3
    assert pictures == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    assert [host.key for host in source] == ["wide", "high", "wide"]


def test_it_evaluates_pictures_in_which_something_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Predictions | None] = []
    predict = DetectionEvaluation.predict

    def noting(self: DetectionEvaluation, weights: Weights) -> Predictions | None:
        found.append(predict(self, weights))
        return found[-1]

    monkeypatch.setattr(DetectionEvaluation, "predict", noting)
    evaluation_bench.main("ssd300", Ssd300Detection, ["scale=test", "device=cpu"])
    assert len(found) == 1 + evaluation_bench.TIMES
    for predictions in found:
        assert predictions is not None
        assert len(predictions.values["score"]) > 0
    assert "2 pictures in" in capsys.readouterr().out
