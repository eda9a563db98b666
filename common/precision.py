"""Names of precisions in the configuration and the dtypes that they mean."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Dtype of weights, activations and gradients. Masters, statistics and losses are fp32; with fp64, for checks, fp64."""
