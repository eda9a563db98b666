"""Scores of masks, and of boxes beside them, against pycocotools; and what processes do for them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from made_up_masks import MadeUp, made_up, read_annotations
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.contract.evaluation import Predictions
from common.detection.coco_scorer import MaskScorer
from common.errors import RankFailure

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of decode

NAMES = (
    *("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large"),
    *("AR_1", "AR_10", "AR_100", "AR_small", "AR_medium", "AR_large"),
)


def oracle(made: MadeUp) -> dict[str, float]:
    """pycocotools' figures of both kinds, by our names."""
    figures: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = json.loads(json.dumps(made.dataset))
        coco.createIndex()
        common = ("image_id", "category_id", "score")
        for name, kind, key, source in (
            ("BBOX", "bbox", "bbox", "box"),
            ("SEGM", "segm", "segmentation", "segmentation"),
        ):
            rows = [{**{entry: row[entry] for entry in common}, key: row[source]} for row in made.results]
            judge = COCOeval(coco, coco.loadRes(rows), kind)
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
            values = dict(zip(NAMES, judge.stats.tolist(), strict=True))
            figures |= {name if entry == "AP" else f"{name}_{entry}": value for entry, value in values.items()}
    return figures


def opened(made: MadeUp, folder: Path, processes: int = 1) -> MaskScorer:
    (folder / "objects.json").write_text(json.dumps(made.dataset))
    scorer = MaskScorer(read_annotations, torch.device("cpu"), processes)
    scorer.open_data(folder)
    return scorer


@pytest.mark.parametrize("seed", range(4))
def test_figures_are_pycocotools(seed: int, tmp_path: Path) -> None:
    made = made_up(seed, decimals=(1, 2, 8)[seed % 3])
    figures, expected = opened(made, tmp_path).score(made.predictions), oracle(made)
    assert figures.pop("eval_samples") == 5
    assert list(figures) == list(expected)
    assert figures == pytest.approx(expected, rel=0, abs=1e-12)
    assert 0 < figures["SEGM"] < figures["SEGM_AP50"] < 1
    assert figures["SEGM"] != figures["BBOX"]


def test_more_than_100_detections_of_a_picture_and_class(tmp_path: Path) -> None:
    made = made_up(10, pictures=2, classes=1, objects=12, found=160)
    figures = opened(made, tmp_path).score(made.predictions)
    del figures["eval_samples"]
    assert figures == pytest.approx(oracle(made), rel=0, abs=1e-12)


def test_nothing_found_is_0(tmp_path: Path) -> None:
    made = made_up(11)
    none = {name: column[:0] for name, column in made.predictions.values.items() if name != "pictures"}
    figures = opened(made, tmp_path).score(Predictions({"pictures": made.predictions.values["pictures"], **none}))
    assert (figures["BBOX"], figures["SEGM"]) == (0, 0)


def test_a_mask_of_no_pixel_finds_nothing(tmp_path: Path) -> None:
    made = made_up(12)
    size = {entry["id"]: (entry["height"], entry["width"]) for entry in made.dataset["images"]}
    whole = [int(np.prod(size[row["image_id"]])) for row in made.results]
    empty = {"run_count": np.ones(len(whole), np.int32), "runs": np.array(whole, np.int32)}
    figures = opened(made, tmp_path).score(Predictions({**made.predictions.values, **empty}))
    assert figures["SEGM"] == 0
    assert figures["BBOX"] > 0


def test_a_mask_that_does_not_cover_its_picture_is_refused(tmp_path: Path) -> None:
    made = made_up(13)
    runs = made.predictions.values["runs"].copy()
    runs[0] += 1
    message = r"^the runs of a mask in picture \d+ make (\d+) px, but it has \d+ x \d+$"
    with pytest.raises(ValueError, match=message):
        opened(made, tmp_path).score(Predictions({**made.predictions.values, "runs": runs}))


def test_pictures_that_were_not_all_seen_have_no_score(tmp_path: Path) -> None:
    made = made_up(14)
    values = {**made.predictions.values, "pictures": made.predictions.values["pictures"][:-1]}
    with pytest.raises(RuntimeError, match="4 of 5 pictures were evaluated"):
        opened(made, tmp_path).score(Predictions(values))


def test_processes_find_what_one_finds_and_end_with_the_scorer(tmp_path: Path) -> None:
    made, other = made_up(15), made_up(15, decimals=8)
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


def test_a_failure_in_a_process_is_told_and_its_end_noticed(tmp_path: Path) -> None:
    made = made_up(16)
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
