"""Detections against torchvision's, which filters each picture by itself, and the network's pictures in their sizes."""

import pytest
import torch
from torchvision_retinanet import (
    CLASSES,
    IMAGE_SIZE,
    as_torchvision_has_it,
    level_anchors,
    levels_of,
    torchvision_retinanet,
)

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.detect import Detector
from benchmarks.retinanet.model import HeadOutput, anchors
from common.mlperf.fixed import fixed_facts


class _Bias:
    """The part of the network that the detector uses with given outputs of the heads."""

    def __init__(self, bias):
        self.logit_bias = bias


def found_by_us(levels, bias, size, **changes):
    facts = fixed_facts(Facts, "retinanet", classes=CLASSES, image_size=IMAGE_SIZE, **changes)
    own = [HeadOutput(level.logits_NCHW.clone(), level.offsets_NCHW) for level in levels]
    detector = Detector(_Bias(bias), facts, anchors(IMAGE_SIZE), {"suppression": "reference"})
    return detector.select(own, (IMAGE_SIZE, IMAGE_SIZE), size)


def rows_of(boxes, scores, classes):
    """Sorted, to be compared as sets."""
    rows = torch.cat([boxes.double(), scores.double()[:, None], classes.double()[:, None]], 1)
    return rows[sorted(range(len(rows)), key=lambda row: tuple(rows[row, [4, 5, 0, 1, 2, 3]].tolist()))]


@pytest.mark.parametrize(
    ("candidates", "detections", "spread"),
    [(1000, 300, 2.0), (40, 300, 2.0), (1000, 25, 0.5), (1000, 300, 0.01)],
    ids=["many", "few candidates of a level", "few detections", "hardly any above the threshold"],
)
def test_detections_are_torchvisions(candidates, detections, spread):
    generator = torch.Generator().manual_seed(candidates + detections)
    levels, bias = levels_of(2, generator, spread=spread)
    bias -= 3.0
    model = torchvision_retinanet(topk_candidates=candidates, detections_per_img=detections)
    outputs = as_torchvision_has_it(levels, bias)
    shapes = [(IMAGE_SIZE, IMAGE_SIZE)] * 2
    expected = model.postprocess_detections(outputs, [level_anchors()] * 2, shapes)
    sizes = torch.tensor([[200.0, 100.0], [96.0, 96.0]])
    expected = model.transform.postprocess(expected, shapes, [(200, 100), (96, 96)])

    found = found_by_us(levels, bias, sizes, candidates=candidates, detections=detections)
    for picture, others in enumerate(expected):
        valid = found.valid[picture]
        assert valid.sum() == len(others["scores"])
        box = found.box[picture][valid]
        corners = torch.cat([box[:, :2], box[:, :2] + box[:, 2:]], 1)
        torch.testing.assert_close(
            rows_of(corners, found.score[picture][valid], found.class_id[picture][valid]),
            rows_of(others["boxes"], others["scores"], others["labels"]),
            rtol=1e-5,
            atol=1e-4,
        )
    assert any(len(others["scores"]) for others in expected)


def test_nothing_above_the_threshold_is_nothing_found():
    levels, bias = levels_of(1, torch.Generator().manual_seed(0), spread=0.1)
    found = found_by_us(levels, bias - 20.0, torch.tensor([[96.0, 96.0]]))
    assert not found.valid.any()
