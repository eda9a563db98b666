"""What the bench of Mask R-CNN's evaluation measures: masks that a real network finds, scored against what is there."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.maskrcnn import evaluate_bench
from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from common.detection import evaluation_bench


def test_it_evaluates_and_scores_masks_of_which_some_are_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    evaluation_bench.main("maskrcnn", MaskRCNNSegmentation, ["scale=test", "device=cpu"], evaluate_bench.scored)
    said = capsys.readouterr().out
    assert "2 pictures in" in said
    found = re.search(r"([\d,]+) detections of ([\d,]+) runs .* BBOX (\S+), SEGM (\S+)\n", said)
    assert found is not None, said
    detections, runs = (int(number.replace(",", "")) for number in found.groups()[:2])
    assert 0 < detections < runs
    assert 0 < float(found[3]) <= 1


def test_objects_are_every_other_detection_of_a_picture_from_the_best_on() -> None:
    pictures = np.array([7, 7, 7, 7, 7, 3, 9, 9])
    assert evaluate_bench._some(pictures, 2).tolist() == [0, 2, 5, 6]
