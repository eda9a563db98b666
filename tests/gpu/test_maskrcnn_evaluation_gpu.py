"""Mask R-CNN's evaluation on one GPU: captured without a wait for the device, and what eager passes find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from common.config import loading
from common.config.composition import compose
from common.contract.evaluation import Predictions
from common.detection.evaluation import DetectionEvaluation
from common.distributed.layout import Layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PICTURES = 7


def built(*overrides: str) -> tuple[MaskRCNNSegmentation, DetectionEvaluation]:
    """A network with random heads, whose evaluation reads pictures of noise of every shape."""
    size = f"benchmark.eval_samples={PICTURES}"
    run, _ = loading.load(
        compose(["benchmark=maskrcnn", "scale=1xH200", "reader.eval_batch=2", "assets_dir=null", size, *overrides]),
        lambda _: MaskRCNNSegmentation,
    )
    workload = MaskRCNNSegmentation(run, Layout(run.layout, device=torch.device("cuda"), seed=1))
    return workload, workload.synthetic_evaluation(workload.layout)


def found(*overrides: str) -> Predictions:
    """Predictions at full size; finding them waits for nothing."""
    workload, evaluation = built(*overrides)
    with torch.cuda.stream(torch.cuda.Stream()):
        evaluation.warm_up()
        evaluation.open_data(Path())
        evaluation.find(workload.weights())
        torch.cuda.set_sync_debug_mode("error")
        try:
            evaluation.find(workload.weights())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        predictions = evaluation.gathered()
    evaluation.close()
    assert predictions is not None
    return predictions


def test_captured_passes_wait_for_nothing_and_find_what_eager_ones_find() -> None:
    captured, eager = found().values, found("cuda_graphs=false").values
    assert len(captured["score"]) > 0
    for name in ("pictures", "picture_id", "class_id", "box", "score", "run_count", "runs"):
        np.testing.assert_array_equal(captured[name], eager[name], err_msg=name)


def test_runs_cover_the_pictures() -> None:
    values = found().values
    ends = np.cumsum(values["run_count"])
    covered = np.diff(np.concatenate([[0], np.cumsum(values["runs"], dtype=np.int64)[ends - 1]]))
    assert set(covered.tolist()) <= {380 * 640, 640 * 380}
