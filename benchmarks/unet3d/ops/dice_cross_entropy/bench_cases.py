"""The loss."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy
from benchmarks.unet3d.ops.bench_layers import BATCHES, FACTS, SIZE, volumes
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each, requested
from common.ops.bench.sweep import Sweep


def case(
    function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, memory_format: torch.memory_format
) -> list[Pass]:
    """Of logits in one of the two formats; a step has contiguous ones."""
    logits = volumes(batch, FACTS.classes, SIZE, dtype).contiguous(memory_format=memory_format)
    logits.requires_grad_()
    label = torch.randint(FACTS.classes, (batch, SIZE, SIZE, SIZE), device=cases.DEVICE, dtype=torch.uint8)
    unit = float(logits.numel() * dtype.itemsize)
    return both_ways(
        lambda: function(logits, label, FACTS.dice_smooth),
        [logits],
        [torch.ones((), device=cases.DEVICE)],
        moved=(unit + label.numel(), 2 * unit + label.numel()),
    )


def entries() -> list[Entry]:
    """Every implementation, ours with the other format, and the compiled reference."""
    losses, sizes = dice_cross_entropy.DICE_CROSS_ENTROPY, {"classes": FACTS.classes}
    build = functools.partial(case, memory_format=torch.contiguous_format)
    last = functools.partial(case, memory_format=torch.channels_last_3d)
    compiled = torch.compile(losses.reference, dynamic=False)
    return [
        *each("loss", losses, "triton", sizes, build),
        Entry("loss triton, NDHWC", 0, functools.partial(requested, losses, "triton", sizes, last)),
        Entry("loss compiled", 0, functools.partial(build, compiled)),
    ]


def sweeps() -> dict[str, Sweep]:
    """Voxels, warps and programs of both kernels."""
    from benchmarks.unet3d.ops.dice_cross_entropy import triton

    build = functools.partial(
        case, dice_cross_entropy.DICE_CROSS_ENTROPY.function("triton"), memory_format=torch.contiguous_format
    )
    found = {}
    for batch in BATCHES:
        for key, programs in (("forward", (4, 8, 16)), ("backward", (0,))):
            blocks = list(itertools.product((256, 512, 1024), (4, 8), programs))
            run = functools.partial(build, batch)
            found[f"loss {key} n {batch}"] = Sweep(triton.TILES, key, blocks, run, key == "backward")
    return found
