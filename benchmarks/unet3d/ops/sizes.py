"""Sizes of the 3D U-Net recipe, for the cases of its operations."""

from __future__ import annotations

from benchmarks.unet3d.config import Facts
from common.mlperf.fixed import fixed_facts

FACTS = fixed_facts(Facts, "unet3d")
SAMPLES = 7
"""Crops per micro-batch."""
