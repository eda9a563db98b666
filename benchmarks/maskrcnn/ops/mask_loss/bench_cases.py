"""The mask head's loss at 128 slots of each of 12 pictures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops import mask_loss
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
    """One channel of the slots with an object is read in both passes; the gradient of all is written."""
    facts = fixed_facts(Facts, "maskrcnn")
    of_objects, side = classes(facts, batch), facts.mask_size
    slots, channels = len(of_objects), facts.classes + 1
    logits = torch.randn((slots, side, side, channels), device=cases.DEVICE).to(dtype).permute(0, 3, 1, 2)
    target = torch.randint(2, (slots, side, side), device=cases.DEVICE).to(torch.uint8)
    read = float(batch * MASKED * side * side * (dtype.itemsize + 1))
    gradient = torch.ones((), device=cases.DEVICE)
    logits.requires_grad_()
    return both_ways(
        lambda: function(logits, target, of_objects),
        [logits],
        [gradient],
        moved=(read, read + float(logits.numel() * dtype.itemsize)),
    )


def entries() -> list[Entry]:
    """Every implementation."""
    return each("mask_loss", mask_loss.IMPLEMENTATIONS, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Elements and warps."""
    from benchmarks.maskrcnn.ops.mask_loss import triton

    choices = {"forward": (256, 512, 1024), "backward": (2048, 4096, 8192)}
    function = mask_loss.IMPLEMENTATIONS["triton"].function
    return {
        f"mask_loss {name} n {batch}": Sweep(
            triton.TILES,
            name,
            list(itertools.product(choices[name], (1, 2, 4, 8))),
            functools.partial(case, function, batch),
            name == "backward",
        )
        for name, batch in itertools.product(choices, BATCHES)
    }
