"""An evaluation from prepared pictures to COCO's figures, as pycocotools has them, with the data's own category ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_ssd300 import SYNTHETIC

from benchmarks.ssd300.workload import Ssd300Detection
from common import cli
from common.config.composition import compose
from common.detection.coco_raw import annotations_name
from common.detection.coco_synthetic import category_ids
from common.distributed.layout import Layout
from tests.common.detection.pycocotools_metrics import box_metrics


def built(prepared: Path, *overrides: str) -> Ssd300Detection:
    """An untrained network on the backbone of the data, which finds boxes near the default ones."""
    assets = f"assets_dir={prepared}-assets"
    run, _ = cli.load(compose(["benchmark=ssd300", "scale=test", "device=cpu", assets, *overrides]))
    workload = Ssd300Detection(run, Layout(run.layout, seed=3))
    with torch.no_grad():
        for head in workload.model.heads:
            head.weight.mul_(0.3)
    return workload


def predicted(workload: Ssd300Detection, prepared: Path):
    """The evaluation, and its predictions."""
    evaluation = workload.evaluation(workload.layout)
    evaluation.warm_up()
    evaluation.open_data(prepared)
    predictions = evaluation.predict(workload.weights())
    assert predictions is not None
    return evaluation, predictions


def test_figures_are_pycocotools(drawn, prepared):
    evaluation, predictions = predicted(built(prepared), prepared)
    evaluation.scorer.open_data(prepared)
    figures = evaluation.scorer.score(predictions)
    evaluation.close()
    values = predictions.values
    assert len(values["score"]) > 20
    assert set(values["class_id"].tolist()) <= set(category_ids(SYNTHETIC.classes)) == {1, 3, 4}
    assert figures.pop("eval_samples") == SYNTHETIC.eval
    assert figures["mean_average_precision"] > 0
    expected = box_metrics(drawn / annotations_name("val"), values)
    np.testing.assert_allclose(list(figures.values()), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 5])
def test_predictions_do_not_depend_on_the_batch(prepared, batch):
    found = [predicted(built(prepared, f"reader.eval_batch={size}"), prepared) for size in (4, batch)]
    (first, one), (second, other) = found
    for name in ("pictures", "picture_id", "class_id"):
        np.testing.assert_array_equal(one.values[name], other.values[name])
    np.testing.assert_allclose(one.values["box"], other.values["box"], rtol=1e-4, atol=1e-3)
    first.close()
    second.close()


def test_what_is_evaluated_are_the_running_statistics(prepared):
    workload = built(prepared)
    evaluation, before = predicted(workload, prepared)
    weights = workload.weights()
    for name, tensor in weights.tensors.items():
        if name.endswith("running_var"):
            weights.tensors[name] = 100 * tensor
    after = evaluation.predict(weights)
    again = evaluation.predict(workload.weights())
    evaluation.close()
    assert not np.array_equal(before.values["score"], after.values["score"])
    np.testing.assert_array_equal(before.values["score"], again.values["score"])
