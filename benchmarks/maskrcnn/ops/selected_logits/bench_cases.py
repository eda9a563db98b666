"""The mask head's last layer for one class at 128 slots of each of 12 pictures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops import selected_logits
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

BATCHES = (12, 4, 1)
"""Pictures of a micro-batch, at which tiles are tried."""
MASKED = 50
"""Slots of a picture with an object, the first ones."""


def classes(facts: Facts, pictures: int) -> Tensor:
    """Of the objects in all slots, -1 without one."""
    slots = facts.mask_slots
    drawn = torch.randint(1, facts.classes + 1, (pictures, slots), device=cases.DEVICE)
    return torch.where(torch.arange(slots, device=cases.DEVICE) < MASKED, drawn, -1).flatten()


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Features of slots with an object are read in both passes; the gradient of all slots is written."""
    facts = fixed_facts(Facts, "maskrcnn")
    of_objects = classes(facts, batch)
    shape = (len(of_objects), facts.mask_size**2, facts.pyramid_channels)
    kinds = facts.classes + 1
    leaves = [
        torch.randn(size, device=cases.DEVICE).to(dtype).requires_grad_()
        for size in (shape, (kinds, shape[2]), (kinds,))
    ]
    gradient = torch.randn(shape[:2], device=cases.DEVICE)
    features = batch * MASKED * shape[1] * shape[2]
    logits = gradient.numel() * 4
    moved = float(features * dtype.itemsize + logits)
    return both_ways(
        lambda: function(*leaves, of_objects),
        leaves,
        [gradient],
        moved=(moved, moved + float(leaves[0].numel() * dtype.itemsize)),
        flops=(2.0 * features, 4.0 * features),
    )


def entries() -> list[Entry]:
    """Every implementation."""
    sizes = {"channels": fixed_facts(Facts, "maskrcnn").pyramid_channels}
    return each("selected_logits", selected_logits.SELECTED_LOGITS, "triton", sizes, case)


def sweeps() -> dict[str, Sweep]:
    """Elements and warps, and programs of a region backward."""
    from benchmarks.maskrcnn.ops.selected_logits import triton

    choices: dict[str, list[tuple[int, ...]]] = {
        "forward": list(itertools.product((4096, 8192, 16384), (2, 4, 8))),
        "backward": list(itertools.product((4096, 8192, 16384), (1, 2, 4, 8), (2, 4, 8))),
        "sums": list(itertools.product((32, 64, 128), (16, 32, 64), (2, 4))),
    }
    function = selected_logits.SELECTED_LOGITS.function("triton")
    return {
        f"selected_logits {name} n {batch}": Sweep(
            triton.TILES, name, choices[name], functools.partial(case, function, batch), name != "forward"
        )
        for name, batch in itertools.product(choices, BATCHES)
    }
