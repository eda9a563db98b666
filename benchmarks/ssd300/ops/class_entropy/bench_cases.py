"""The class entropies of all six levels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.ops import class_entropy
from benchmarks.ssd300.ops.head_results import HeadChannels
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

BATCHES = (114, 24, 3)
"""Pictures of a micro-batch, at which tiles are tried."""
_MULTIPLE = 8
"""What the channels of a head are padded to."""


def case(function: Callable[..., tuple[Tensor, Tensor]], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Logits are read in both passes and their gradient is written; offsets are copied both ways."""
    facts = fixed_facts(Facts, "ssd300")
    channels = [HeadChannels(kinds, facts.classes + 1) for kinds in facts.boxes_per_cell]
    results = []
    for head, places in zip(channels, facts.level_sizes, strict=True):
        count = -(-(head.logits + head.offsets) // _MULTIPLE) * _MULTIPLE
        drawn = torch.randn((batch, count, places, places), device=cases.DEVICE).to(dtype)
        results.append(drawn.contiguous(memory_format=torch.channels_last).requires_grad_())
    boxes = sum(head.kinds * places * places for head, places in zip(channels, facts.level_sizes, strict=True))
    drawn = torch.rand((batch, boxes), device=cases.DEVICE)
    objects = torch.randint(1, facts.classes + 1, (batch, boxes), device=cases.DEVICE)
    classes = torch.where(drawn < 0.003, objects, 0)  # about 26 default boxes of a picture have a box
    gradients = [
        torch.full((batch, boxes), 0.01, device=cases.DEVICE),
        torch.full((batch, boxes, 4), 0.01, device=cases.DEVICE, dtype=dtype),
    ]
    logits, offsets = (float(batch * boxes * width * dtype.itemsize) for width in (facts.classes + 1, 4))
    ids, sums = (float(batch * boxes * size) for size in (8, 4))
    forward = logits + 2 * offsets + ids + 2 * sums
    return both_ways(
        lambda: function(channels, results, classes),
        results,
        gradients,
        moved=(forward, 2 * logits + 2 * offsets + ids + 2 * sums),
    )


def entries() -> list[Entry]:
    """Every implementation."""
    return each("class_entropy", class_entropy.CLASS_ENTROPY, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Default boxes of a program, and warps, of both passes."""
    from benchmarks.ssd300.ops.class_entropy import triton

    tiles = list(itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8)))
    function = class_entropy.CLASS_ENTROPY.function("triton")
    return {
        f"class_entropy {name} n {batch}": Sweep(
            triton.TILES, name, tiles, functools.partial(case, function, batch), name == "backward"
        )
        for name, batch in itertools.product(("forward", "backward"), BATCHES)
    }
