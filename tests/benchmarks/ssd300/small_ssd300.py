"""The benchmark's facts, a small network's, and a small set of drawn pictures."""

from __future__ import annotations

from typing import Any

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.synthetic import SyntheticBoxes
from common.config.loading import build
from common.detection.config import BoxReaderConfig
from common.mlperf.fixed import fixed_facts

FACTS = fixed_facts(Facts, "ssd300")

SMALL_SHAPE: dict[str, Any] = {
    "classes": 3,
    "image_size": 64,
    "width": 8,
    "layers": [1, 1, 1],
    "extras": [[8, 16, 2], [8, 16, 2]],
    "steps": [8, 16, 32],
    "box_sizes": [12, 24, 42, 60],
    "aspect_ratios": [[2], [2, 3], [2]],
}
SMALL = fixed_facts(Facts, "ssd300", **SMALL_SHAPE)
"""Three levels of 8, 4 and 2 cells a side."""

SYNTHETIC = SyntheticBoxes(
    train=11, eval=5, classes=3, sides=(48, 80), boxes=3, width=8, layers=(1, 1, 1), image_size=64
)


def reader(**changes: Any) -> BoxReaderConfig:
    """Settings of the reader that runs anywhere."""
    given = {
        "threads": 2,
        "prefetch": 1,
        "max_boxes": 12,
        "hw_decoder_load": 0.0,
        "input_batch_multiplier": 1,
        "eval_batch": 4,
        "reader": "torchvision",
    }
    made: BoxReaderConfig = build(BoxReaderConfig, given | changes, "reader")
    return made
