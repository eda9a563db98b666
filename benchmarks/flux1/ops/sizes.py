"""Sizes of the FLUX.1 recipe on one node, for the cases of its operations."""

from __future__ import annotations

import torch

from benchmarks.flux1.config import Facts
from common.mlperf.fixed import fixed_facts

FACTS = fixed_facts(Facts, "flux1")
SAMPLES = 16
"""Samples per micro-batch."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the activations; the recipe trains in bf16."""
