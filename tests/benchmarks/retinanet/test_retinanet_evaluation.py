"""An evaluation from prepared pictures to COCO's figures: as pycocotools has them, in line and in the background."""

import numpy as np
import pytest
import torch

from benchmarks.retinanet.workload import RetinaNetDetection
from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from tests.common.detection.pycocotools_metrics import box_metrics


@pytest.fixture(scope="module")
def data_dir(data_of):
    """The prepared synthetic data of the ``test`` recipe."""
    return data_of("retinanet")


@pytest.fixture(scope="module")
def predicted(data_dir):
    """An evaluation that is open, and what an untrained network that thinks everything likely finds."""
    run, _ = cli.load(compose(["benchmark=retinanet", "scale=test", "device=cpu", f"assets_dir={data_dir}-assets"]))
    workload = RetinaNetDetection(run, Layout(run.layout, seed=3))
    with torch.no_grad():
        workload.model.logit_bias.zero_()
    evaluation = workload.evaluation(workload.layout)
    evaluation.warm_up()
    evaluation.open_data(data_dir)
    predictions = evaluation.predict(workload.weights())
    assert predictions is not None
    yield evaluation, predictions
    evaluation.close()


def test_every_picture_is_seen_once_and_many_boxes_are_found(predicted):
    _, predictions = predicted
    assert sorted(predictions.values["pictures"]) == [1, 2, 3, 4, 5, 6]
    assert len(predictions.values["score"]) > 100


def test_figures_are_pycocotools(predicted, data_dir):
    evaluation, predictions = predicted
    evaluation.scorer.open_data(data_dir)
    figures = evaluation.scorer.score(predictions)
    assert figures.pop("eval_samples") == 6
    assert figures["mean_average_precision"] > 0
    expected = box_metrics(data_dir / "validation" / "labels" / "openimages-mlperf.json", predictions.values)
    np.testing.assert_allclose(list(figures.values()), expected, rtol=0, atol=1e-12)
