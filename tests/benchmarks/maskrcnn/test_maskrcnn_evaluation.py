"""An evaluation from prepared pictures to COCO's figures of boxes and masks, as pycocotools has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from small_coco import SYNTHETIC

from benchmarks.maskrcnn.config import Facts, MaskRCNNConfig, MaskReaderConfig, ModelConfig
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.evaluate import evaluation, ground_truth
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.pictures import Preparer
from benchmarks.maskrcnn.prepared import open_prepared
from common.contract.evaluation import Predictions, Weights
from common.detection.annotations import read_coco
from common.detection.coco_raw import annotations_name
from common.detection.coco_scorer import MaskScorer
from common.detection.evaluation import DetectionEvaluation
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from tests.common.detection.pycocotools_metrics import box_and_mask_metrics
from tests.common.detection.pycocotools_metrics import ground_truth as ground_truth_of

CPU = torch.device("cpu")
FACTS = fixed_facts(
    Facts, "maskrcnn", classes=SYNTHETIC.classes, layers=[1, 1, 1, 1], width=8, pyramid_channels=8, box_channels=16,
    box_resolution=3, mask_resolution=4, mask_convolutions=1, anchor_sizes=[8, 16, 32, 64, 96],
    min_size=64, max_size=128, longest_side=640, eval_candidates=30, eval_proposals=30, detections=20,
)  # fmt: skip
SHAPES = ((64, 128), (128, 64), (128, 128))


def built(batch: int, processes: int = 1) -> tuple[DetectionEvaluation, MaskRCNN]:
    """An untrained network that finds boxes of many sizes and masks of any form."""
    random = torch.Generator().manual_seed(1)
    model = MaskRCNN(FACTS, random)
    with torch.no_grad():
        for layer, deviation in ((model.box_head.cls_score, 0.1), (model.mask_head.mask_fcn_logits, 1.0)):
            layer.weight.normal_(0, deviation, generator=random)
    reader = MaskReaderConfig(
        threads=1, prefetch=1, max_boxes=12, hw_decoder_load=0.0, input_batch_multiplier=1, eval_batch=batch,
        reader="torchvision", shapes=SHAPES,
    )  # fmt: skip
    own = MaskRCNNConfig(FACTS, cast(Any, None), ModelConfig(backbone="R-50.pkl", loss_scale=1.0), reader)
    preparer = Preparer(FACTS, {}, CPU, torch.float32)
    data, scorer = MaskData(FACTS, reader, torch.float32), MaskScorer(ground_truth, CPU, processes)
    made, choices = evaluation(model, own, data, preparer, Layout(), False, scorer)
    assert choices == dict.fromkeys(("suppression", "roi_align", "paste"), "reference")
    return made, model


def predicted(made: DetectionEvaluation, model: MaskRCNN, prepared: Path) -> Predictions:
    made.warm_up()
    made.open_data(prepared)
    predictions = made.predict(Weights(dict(model.named_parameters())))
    assert predictions is not None
    return predictions


def results(values: dict[str, Any], truth: COCO) -> list[dict[str, Any]]:
    """COCO's result list, each mask as uncompressed runs."""
    ends = np.cumsum(values["run_count"])
    rows = []
    for index, end in enumerate(ends.tolist()):
        picture = truth.imgs[int(values["picture_id"][index])]
        counts = values["runs"][end - values["run_count"][index] : end].tolist()
        outline = {"size": [picture["height"], picture["width"]], "counts": counts}
        rows.append(
            {
                "image_id": picture["id"],
                "category_id": int(values["class_id"][index]),
                "bbox": values["box"][index].astype(np.float64).tolist(),
                "score": float(values["score"][index]),
                "segmentation": truth.annToRLE({"image_id": picture["id"], "segmentation": outline}),
            }
        )
    return rows


def expected(truth_file: Path, values: dict[str, Any]) -> dict[str, float]:
    """Return pycocotools' metrics of boxes and masks."""
    truth = ground_truth_of(truth_file)
    return box_and_mask_metrics(truth, results(values, truth))


def near(values: dict[str, Any], drawn: Path, folder: Path) -> Path:
    """Ground truth near detections: of every third the box, and as outline the box or the mask by turns."""
    content = json.loads((drawn / annotations_name("val")).read_bytes())
    size = {picture["id"]: [picture["height"], picture["width"]] for picture in content["images"]}
    content["annotations"] = []
    starts = np.cumsum(values["run_count"]) - values["run_count"]
    for row in range(0, len(starts), 3):
        picture = int(values["picture_id"][row])
        x, y, width, height = values["box"][row].tolist()
        runs = values["runs"][starts[row] : starts[row] + values["run_count"][row]].tolist()
        box = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        content["annotations"].append(
            {
                "id": row + 1,
                "image_id": picture,
                "category_id": int(values["class_id"][row]),
                "bbox": [x, y, width, 0.8 * height],
                "segmentation": box if row % 2 else {"size": size[picture], "counts": runs},
                "area": width * height,
                "iscrowd": 0,
            }
        )
    (folder / "objects.json").write_text(json.dumps(content))
    return folder / "objects.json"


def test_figures_are_pycocotools(drawn, prepared, tmp_path):
    made, model = built(2)
    predictions = predicted(made, model, prepared)
    values = predictions.values
    assert len(values["score"]) > 20
    assert set(values["class_id"].tolist()) <= set(open_prepared(prepared).category_ids())
    made.scorer.open_data(prepared)
    figures = made.scorer.score(predictions)
    made.close()
    assert figures.pop("eval_samples") == SYNTHETIC.eval
    assert figures == pytest.approx(expected(drawn / annotations_name("val"), values), rel=0, abs=1e-12)
    found = MaskScorer(lambda root: read_coco(near(values, drawn, root), segmentations=True), CPU, 1)
    found.open_data(tmp_path)
    figures = found.score(predictions)
    assert figures.pop("eval_samples") == SYNTHETIC.eval
    assert figures == pytest.approx(expected(tmp_path / "objects.json", values), rel=0, abs=1e-12)
    assert 0 < figures["SEGM"] != figures["BBOX"] > 0


@pytest.mark.parametrize("batch", [1, 5])
def test_predictions_do_not_depend_on_the_batch(prepared, batch):
    found = []
    for size in (3, batch):
        made, model = built(size)
        found.append(predicted(made, model, prepared).values)
        made.close()
    one, other = (
        {int(p): np.sort(values["score"][values["picture_id"] == p]) for p in np.sort(values["pictures"])}
        for values in found
    )
    assert list(one) == list(other)
    for picture, scores in one.items():
        np.testing.assert_allclose(scores, other[picture], rtol=1e-4, atol=1e-5)
