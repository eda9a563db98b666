"""Scores of masks, and of boxes beside them, against pycocotools; and what processes do for them."""

from __future__ import annotations

import json
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from synthetic_masks import SyntheticMasks, read_annotations, synthetic

from common.contract.evaluation import Predictions
from common.detection.coco_scorer import MaskScorer
from common.errors import RankFailure
from tests.common.detection.pycocotools_metrics import box_and_mask_metrics, ground_truth

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of decode


def oracle(made: SyntheticMasks) -> dict[str, float]:
    """Return pycocotools' metrics of boxes and masks."""
    return box_and_mask_metrics(ground_truth(made.dataset), made.results)


def opened(made: SyntheticMasks, folder: Path, processes: int = 1) -> MaskScorer:
    (folder / "objects.json").write_text(json.dumps(made.dataset))
    scorer = MaskScorer(read_annotations, torch.device("cpu"), processes)
    scorer.open_data(folder)
    return scorer


@pytest.mark.parametrize("seed", range(4))
def test_figures_are_pycocotools(seed, tmp_path):
    made = synthetic(seed, decimals=(1, 2, 8)[seed % 3])
    figures, expected = opened(made, tmp_path).score(made.predictions), oracle(made)
    assert figures.pop("eval_samples") == 5
    assert list(figures) == list(expected)
    assert figures == pytest.approx(expected, rel=0, abs=1e-12)
    assert 0 < figures["SEGM"] < figures["SEGM_AP50"] < 1
    assert figures["SEGM"] != figures["BBOX"]


def test_more_than_100_detections_of_a_picture_and_class(tmp_path):
    made = synthetic(10, pictures=2, classes=1, objects=12, found=160)
    figures = opened(made, tmp_path).score(made.predictions)
    del figures["eval_samples"]
    assert figures == pytest.approx(oracle(made), rel=0, abs=1e-12)


def test_nothing_found_is_0(tmp_path):
    made = synthetic(11)
    none = {name: column[:0] for name, column in made.predictions.values.items() if name != "pictures"}
    figures = opened(made, tmp_path).score(Predictions({"pictures": made.predictions.values["pictures"], **none}))
    assert (figures["BBOX"], figures["SEGM"]) == (0, 0)


def test_a_mask_of_no_pixel_finds_nothing(tmp_path):
    made = synthetic(12)
    size = {entry["id"]: (entry["height"], entry["width"]) for entry in made.dataset["images"]}
    whole = [int(np.prod(size[row["image_id"]])) for row in made.results]
    empty = {"run_count": np.ones(len(whole), np.int32), "runs": np.array(whole, np.int32)}
    figures = opened(made, tmp_path).score(Predictions({**made.predictions.values, **empty}))
    assert figures["SEGM"] == 0
    assert figures["BBOX"] > 0


def test_a_mask_that_does_not_cover_its_picture_is_refused(tmp_path):
    made = synthetic(13)
    runs = made.predictions.values["runs"].copy()
    runs[0] += 1
    message = r"^the runs of a mask in picture \d+ make (\d+) px, but it has \d+ x \d+$"
    with pytest.raises(ValueError, match=message):
        opened(made, tmp_path).score(Predictions({**made.predictions.values, "runs": runs}))


def test_pictures_that_were_not_all_seen_have_no_score(tmp_path):
    made = synthetic(14)
    values = {**made.predictions.values, "pictures": made.predictions.values["pictures"][:-1]}
    with pytest.raises(RuntimeError, match="4 of 5 pictures were evaluated"):
        opened(made, tmp_path).score(Predictions(values))


def test_processes_find_what_one_finds_and_end_with_the_scorer(tmp_path):
    made, other = synthetic(15), synthetic(15, decimals=8)
    alone = opened(made, tmp_path)
    scorer = pickle.loads(pickle.dumps(MaskScorer(read_annotations, torch.device("cpu"), 3)))
    before = set(psutil.Process().children())
    scorer.warm_up()
    scorer.open_data(tmp_path)
    started = set(psutil.Process().children()) - before
    assert len(started) == 3
    for predictions in (made.predictions, other.predictions, made.predictions):
        assert scorer.score(predictions) == alone.score(predictions)
    scorer.close()
    assert not any(process.is_running() for process in started)


def test_a_failure_in_a_process_is_reported_and_its_end_noticed(tmp_path):
    made = synthetic(16)
    runs = made.predictions.values["runs"].copy()
    runs[0] += 1
    before = set(psutil.Process().children())
    scorer = opened(made, tmp_path, processes=2)
    try:
        with pytest.raises(RuntimeError, match="ValueError: the runs of a mask in picture"):
            scorer.score(Predictions({**made.predictions.values, "runs": runs}))
        for process in set(psutil.Process().children()) - before:
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match="was killed by SIGKILL"):
            scorer.score(made.predictions)
    finally:
        scorer.close()
