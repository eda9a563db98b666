"""What the bench of evaluations measures: as many pictures as asked for, each once, found in by a real network."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ssd300.workload import Ssd300Detection
from common.contract.evaluation import Predictions
from common.contract.workload import Workload
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
    gathered = DetectionEvaluation.gathered

    def noting(self: DetectionEvaluation) -> Predictions | None:
        found.append(gathered(self))
        return found[-1]

    def scored(workload: Workload, predictions: Predictions) -> str:
        assert predictions is found[-1]
        return f"scored by {workload.title}"

    monkeypatch.setattr(DetectionEvaluation, "gathered", noting)
    evaluation_bench.main("ssd300", Ssd300Detection, ["scale=test", "device=cpu"], scored)
    assert len(found) == 1 + evaluation_bench.TIMES
    for predictions in found:
        assert predictions is not None
        assert len(predictions.values["score"]) > 0
    said = capsys.readouterr().out
    assert "2 pictures in" in said
    assert "until it is on the host\nscored by SSD300" in said
