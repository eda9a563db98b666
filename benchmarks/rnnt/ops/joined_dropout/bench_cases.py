"""Dropout behind the encoder's first part, at LibriSpeech's longest utterances."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.ops import joined_dropout
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

FRAMES = 642


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions."""
    facts = fixed_facts(Facts, "rnnt")
    shape = (FRAMES, batch, facts.encoder_width)
    x_TBH = torch.randn(shape, device=cases.DEVICE, dtype=dtype, requires_grad=True)
    seed = torch.zeros((), dtype=torch.int64, device=cases.DEVICE)
    dy_SBK = torch.randn((FRAMES // 2, batch, 2 * facts.encoder_width), device=cases.DEVICE, dtype=dtype)
    moved = 2.0 * x_TBH.numel() * dtype.itemsize
    return both_ways(lambda: function(x_TBH, facts.encoder_dropout, seed, 1), [x_TBH], [dy_SBK], moved=(moved, moved))


def entries() -> list[Entry]:
    """Every implementation."""
    sizes = {"width": fixed_facts(Facts, "rnnt").encoder_width}
    return each("joined_dropout", joined_dropout.JOINED_DROPOUT, "triton", sizes, case)


def sweeps() -> dict[str, Sweep]:
    """None: its kernel has a single tile."""
    return {}
