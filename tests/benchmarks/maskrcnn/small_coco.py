"""A small set of drawn pictures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from benchmarks.maskrcnn.config import Facts, MaskReaderConfig
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.synthetic import SyntheticOutlines
from common.config.loading import build
from common.data.batches import Block
from common.mlperf.fixed import fixed_facts

SYNTHETIC = SyntheticOutlines(
    train=14, eval=6, classes=12, sides=(64, 120), boxes=4, width=8, layers=(1, 1, 1, 1), image_size=64, seed=3
)


READER = {
    "reader": "torchvision", "threads": 2, "prefetch": 2, "max_boxes": 12, "hw_decoder_load": 0.0,
    "input_batch_multiplier": 1, "eval_batch": 2, "shapes": [[192, 320], [320, 192]],
}  # fmt: skip
SHORT, LONG, SLOT = 150, 300, 128
MICRO_BATCH = 3
BLOCK = Block(0, 1, 3, 0, 3 * SYNTHETIC.train)


def settings(changed: Mapping[str, object] = MappingProxyType({}), **reader: object) -> MaskData:
    """Pictures of 64 to 120 px become 150 px high or wide; ``changed`` are facts, ``reader`` how they are read."""
    facts = {"classes": SYNTHETIC.classes, "min_size": SHORT, "max_size": LONG, "longest_side": SLOT, **changed}
    config = build(MaskReaderConfig, READER | reader, "reader")
    return MaskData(fixed_facts(Facts, "maskrcnn", **facts), config, torch.float32)
