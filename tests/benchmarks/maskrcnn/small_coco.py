"""A small set of drawn pictures."""

from __future__ import annotations

from benchmarks.maskrcnn.synthetic import SyntheticOutlines

SYNTHETIC = SyntheticOutlines(
    train=14, eval=6, classes=12, sides=(64, 120), boxes=4, width=8, layers=(1, 1, 1, 1), image_size=64, seed=3
)
