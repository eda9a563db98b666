"""The group norms of a latent U-Net, each kind once, in every implementation that knows it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops import group_norm
from common.ops.bench import latent_unet as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.latent_unet import BATCHES, NORMS, Norm
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import leaf, normal, size_of

READ_AGAIN = 1024
"""Pixels of a sample above which both directions read their inputs twice."""


def case(function: Callable[..., Any], packs: int, dtype: torch.dtype, *, norm: Norm, samples: int) -> list[Pass]:
    """With the gradients of the inputs that are handed on."""
    channels = sum(norm.parts)

    def pictures(part: int) -> Tensor:
        return normal(dtype, samples, part, norm.size, norm.size).contiguous(memory_format=torch.channels_last)

    inputs = tuple(pictures(part).requires_grad_() for part in norm.parts)
    weight, bias = leaf(dtype, channels), leaf(dtype, channels)
    added = leaf(dtype, samples, channels) if norm.added else None
    groups, epsilon = size.GROUPS, size.EPSILON
    if norm.transformer:
        groups, epsilon = size.TRANSFORMER_GROUPS, size.TRANSFORMER_EPSILON

    def run() -> tuple[Tensor, ...]:
        options = {"silu": not norm.transformer, "added_NC": added}
        if norm.added:
            return (function(inputs, weight, bias, groups, epsilon, **options),)
        y, kept = function(inputs, weight, bias, groups, epsilon, **options, keep=True)
        return y, *kept

    d_results = [pictures(channels), *([] if norm.added else [pictures(part) for part in norm.parts])]
    unit = sum(size_of(x) for x in inputs)
    again = norm.size**2 > READ_AGAIN
    moved = (3.0 if again else 2.0), (5.0 if again else 3.0) + (not norm.added)
    leaves = [*inputs, weight, bias, *([] if added is None else [added])]
    return both_ways(run, leaves, d_results, moved=(moved[0] * unit, moved[1] * unit))


def _name(norm: Norm, samples: int) -> str:
    kind = " added" if norm.added else " transformer" if norm.transformer else ""
    return f"group_norm {'+'.join(map(str, norm.parts))}@{norm.size}{kind} n {samples}"


def _apex_has(norm: Norm) -> bool:
    return not norm.added and len(norm.parts) == 1


def entries() -> list[Entry]:
    """Every norm in every implementation; apex has those of one input, to which nothing is added."""
    found = []
    for samples, norm in itertools.product(BATCHES, NORMS):
        names = [name for name in group_norm.GROUP_NORM.names if name != "apex" or _apex_has(norm)]
        sizes = {
            "channels": sum(norm.parts),
            "groups": size.TRANSFORMER_GROUPS if norm.transformer else size.GROUPS,
            "inputs": len(norm.parts),
            "added": int(norm.added),
        }
        build = functools.partial(case, norm=norm, samples=samples)
        found += each(_name(norm, samples), group_norm.GROUP_NORM, "triton", sizes, build, calls=0, only=names)
    return found


def sweeps() -> dict[str, Sweep]:
    """Tiles of the launches of large samples, and of those of small ones."""
    from common.ops.group_norm import triton

    function = group_norm.GROUP_NORM.function("triton")
    walks: list[tuple[int, ...]] = list(itertools.product((64,), (2048, 4096, 8192), (4, 8), (0, 4, 7), (1, 3)))
    # a slab of no elements sends every sample through several launches
    slabs: list[tuple[int, ...]] = [(0, 32, 1, 1024, 1024, 1, 0)]
    slabs += itertools.product((1 << 20,), (32,), (0, 16384, 32768), (4096, 8192), (512, 1024), (1, 3), (1 << 40,))
    found = {}
    for samples in BATCHES:
        large = functools.partial(case, function, 0, norm=Norm((320,), 64), samples=samples)
        for key in triton.TILES:
            backward = key in ("gradient_sums", "input_gradient")
            found[f"group_norm {key} n {samples}"] = Sweep(triton.TILES, key, walks, large, backward)
        small = (Norm((640,), 32), Norm((1280,), 16), Norm((1280, 1280), 8))
        for norm, key in itertools.product(small, triton.SLAB_TILES):
            build = functools.partial(case, function, 0, norm=norm, samples=samples)
            found[f"{_name(norm, samples)} {key}"] = Sweep(triton.SLAB_TILES, key, slabs, build, key == "backward")
    return found
