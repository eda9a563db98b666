"""Cases of the update rules: one update of all tensors of a network.

Bytes count each operand once. For tensors with a trust ratio, LAMB's kernels read weights and moments twice, so that
they cannot reach the bandwidth of a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.sizes import recommendation, transformer
from common.optim.adaptive import LAMB, Adagrad, Adam, AdamW
from common.optim.buffers import FRAGMENT_ALIGNMENT, Fragment, Shard, split_masters
from common.optim.momentum import LARS, SGD
from common.optim.rules import Binding, GroupSettings, Rule, Update

Tensors = Sequence[tuple[int, int]]
"""Number of elements and parameter group of each tensor."""


def shard_of(
    draw: Draw,
    tensors: Tensors,
    dtype: torch.dtype,
    first: int = 0,
    weight_scale: float = 1.0,
    gradient_scale: float = 1.0,
    gradient_dtype: torch.dtype | None = None,
    remainders: bool = False,
) -> Shard:
    """Return a shard of whole tensors with random weights and gradients; without tensors all of it is padding.

    Args:
        first: number of the first tensor.
        weight_scale, gradient_scale: standard deviations.
        gradient_dtype: dtype of the gradients; None for that of the parameters.
        remainders: whether masters are kept as remainders.
    """
    fragments, stop = [], 0
    for number, (elements, group) in enumerate(tensors, first):
        start, stop = stop, stop + -(-elements // FRAGMENT_ALIGNMENT) * FRAGMENT_ALIGNMENT
        fragments.append(Fragment(number, group, start, elements, stop))

    def flat(scale: float, of: torch.dtype) -> Tensor:
        return without_padding(draw.normal(stop or FRAGMENT_ALIGNMENT, scale=scale, dtype=of), fragments)

    masters = flat(weight_scale, torch.float32)
    parameters = masters if dtype == torch.float32 else draw.rounded(masters, dtype)
    if remainders and not draw.fp64:
        parameters, masters = split_masters(masters)
    return Shard(parameters, flat(gradient_scale, gradient_dtype or dtype), masters, tuple(fragments))


def without_padding(flat: Tensor, fragments: Sequence[Fragment]) -> Tensor:
    """Set the elements that belong to no tensor to 0, in place."""
    edges = [0, *(edge for f in fragments for edge in (f.start, f.start + f.numel)), len(flat)]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        flat[start:stop] = 0
    return flat


def passes(
    function: Any,
    draw: Draw,
    rule: Rule,
    settings: Sequence[GroupSettings],
    shards: Sequence[Tensors],
    rate: float = 1e-6,
    factor: float = 1.0,
    step: int = 9,
    state_scale: float = 1.0,
    others: float = 0.0,
    last: float | None = None,
    skip: bool = False,
    average: float | None = None,
    **options: Any,
) -> list[Pass]:
    """Make the passes: measure the gradients; update weights and state.

    The facts of an update are whether 16-bit weights are the rounded masters, and whether a skipped update left every
    bit as it was.

    Args:
        function: makes an update from a formula and a binding.
        draw: source of the values. The first shard has parameters in its dtype, the others in fp32.
        rate: learning rate of the first group; the second has twice as much, and so on.
        step: number of updates before this one.
        state_scale: mean of the state.
        others: sum of squares that other ranks add for each tensor. If it is not 0, they have one more tensor.
        last: last gradient of the first shard; None for a random one. The update is skipped if it is not finite.
        skip: skip the update although all gradients are finite.
        average: share of the new weights in averages, which are updated too; None for no averages.
        options: options of :func:`shard_of` for the first shard.
    """
    firsts = [0, *itertools.accumulate(map(len, shards))]
    parts = [shard_of(draw, shards[0], draw.dtype, **options)]
    parts += [shard_of(draw, more, torch.float32, first) for more, first in zip(shards[1:], firsts[1:], strict=False)]
    if last is not None:
        fragment = parts[0].fragments[-1]
        parts[0].gradients[fragment.start + fragment.numel - 1] = last
    tensors = firsts[-1] + (others != 0)

    def sum_over_shards(squares: Tensor) -> None:
        squares.add_(others)

    update: Update = function(rule.formula(), Binding(parts, settings, tensors, sum_over_shards))
    for flats in update.states.values():
        for part, flat in zip(parts, flats, strict=True):
            flat.copy_(draw.uniform(len(flat), low=0.5, high=1.5, dtype=torch.float32)).mul_(state_scale)
            without_padding(flat, part.fragments)
    stats = torch.zeros(2, dtype=torch.float64 if draw.fp64 else torch.float32, device=draw.device)
    rates_G = rate * torch.arange(1, 1 + len(settings), device=draw.device)
    grad_factor, steps = torch.full_like(stats[0], factor), torch.full((), step, device=draw.device)
    writes = not skip and (last is None or math.isfinite(last))
    write = torch.full((), writes, device=draw.device)
    state = [flat for flats in update.states.values() for flat in flats]
    averages = [
        without_padding(draw.normal(len(part.masters), dtype=torch.float32), part.fragments)
        for part in (() if average is None else parts)
    ]
    share = torch.full((), 0.0 if average is None else average, device=draw.device)
    in_update = bool(averages) and update.average_into(averages, share)
    # Remainders are compared elsewhere: they are integers that depend on the last bits of a master.
    weights = [flat for part in parts for flat in (part.parameters, None if part.has_remainders else part.masters)]

    def measure() -> tuple[Tensor, Tensor]:
        stats.zero_()
        update.measure(stats)
        return stats[0] > 0, stats[1]

    flats = [*state, *averages, *(flat for part in parts for flat in (part.parameters, part.masters))]
    before = [] if writes else [flat.clone() for flat in flats]

    def apply() -> tuple[Any, ...]:
        update.apply(rates_G, steps, grad_factor, write)
        if averages and not in_update:
            torch._foreach_lerp_(averages, masters_of(parts), [(share * write).to(flat) for flat in averages])
        return weights, state, averages

    def facts() -> tuple[Any, ...]:
        rounded = [
            None if part.has_remainders else torch.equal(part.parameters, part.masters.to(part.parameters.dtype))
            for part in parts
        ]
        return rounded, writes or all(map(torch.equal, flats, before))

    read = size_of(*(part.gradients for part in parts))
    moved = read + 2 * size_of(*state, *averages, *(part.masters for part in parts))
    for part in parts:
        moved += size_of(part.parameters) * (2 if part.has_remainders else part.has_masters)
    return [Pass("measure", measure, read), Pass("update", apply, moved, facts=facts)]


def masters_of(shards: Sequence[Shard]) -> list[Tensor]:
    """Return the fp32 masters of each shard, or fp64 ones."""
    return [shard.read_masters(slice(None)) for shard in shards]


def openfold() -> Tensors:
    """Return the tensors of OpenFold's 48 Evoformer blocks, which hold 94 % of its parameters."""
    msa, pair, outer, factor = 256, 128, 32, 4
    block = [size for channels in (msa, msa, pair, pair) for size in (*5 * [channels**2], *4 * [channels])]
    block += [8 * pair, *2 * [4 * pair], *2 * [pair]]  # projections of the pair bias, norm of the pairs
    for channels in (msa, pair):  # transitions
        block += [*2 * [factor * channels**2], factor * channels, *3 * [channels]]
    block += [*2 * [outer * msa], *2 * [outer], outer**2 * pair, pair, *2 * [msa]]  # outer product mean
    block += 2 * [*6 * [pair**2], *6 * [pair], *4 * [pair]]  # triangle multiplications
    return [(elements, 0) for elements in 48 * block]


def bert(hidden: int, layers: int, vocabulary: int) -> Tensors:
    """Return the tensors of BERT with both heads: matrices in group 0, biases and norms in group 1.

    Query, key and value are separate tensors.
    """
    square = hidden * hidden
    matrices = [vocabulary * hidden, 512 * hidden, 2 * hidden, square, square, 2 * hidden]
    matrices += layers * [square, square, square, square, 4 * square, 4 * square]
    vectors = [*6 * [hidden], vocabulary, 2, *layers * [*9 * [hidden], 4 * hidden]]
    return [*((elements, 0) for elements in matrices), *((elements, 1) for elements in vectors)]


def resnet() -> tuple[Tensors, Tensors]:
    """Return the tensors of ResNet-50: weights in group 0 and the bias in group 1, and batch norms in group 2."""
    weights, channels, norms = [64 * 3 * 7 * 7], 64, [64]
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            weights += [channels * width, 3 * 3 * width * width, 4 * width * width]
            norms += [width, width, 4 * width]
            if block == 0:
                weights.append(4 * width * channels)
                norms.append(4 * width)
            channels = 4 * width
    weights.append(1000 * channels)
    return [*((elements, 0) for elements in weights), (1000, 1)], [(elements, 2) for elements in 2 * norms]


LLAMA_LAYER = [*((4096 * features, 0) for features in (6144, 4096, 28672, 14336)), (4096, 1), (4096, 1)]

CROSS_NETWORK = 3 * [(512 * 3456, 0), (3456 * 512, 0), (3456, 0)]
LINEAR = (*recommendation.LAYERS.values(), (recommendation.LAST_INPUTS, 1))
DLRM = [*CROSS_NETWORK, *((elements, 0) for inputs, outputs in LINEAR for elements in (inputs * outputs, outputs))]

DECAY = (GroupSettings(1.0, 0.1, False, False), GroupSettings(1.0, 0.0, False, False))
DECAY_AND_RATIO = (GroupSettings(1.0, 0.1, True, False), *DECAY[1:])

# The first tensor has two blocks, and all but one have padding.
SMALL = {"shards": (((4160, 0), (7, 1), (195, 0)), ((70, 0),)), "rate": 0.25, "factor": 0.25}
PLAIN = (GroupSettings(0.5, 0.25, False, True), GroupSettings(3.0, 0.0, False, False, norm_share=0.25))
RATIO = (GroupSettings(0.5, 0.25, True, True), *PLAIN[1:])
RATIO_OUTSIDE = (GroupSettings(0.5, 0.25, True, False), GroupSettings(3.0, 0.0, False, True, norm_share=0.25))
PARTS: dict[str, Any] = {"shards": (((5000, 0), (7, 1)), (), ((70, 0),)), "others": 4.0}
"""Shards with parts of tensors whose rest is on other ranks, and an empty shard."""

NO_DIRECTION = {"gradient_scale": 0.0, "state_scale": 0.0}
ZERO_WEIGHTS = {"weight_scale": 0.0, "last": torch.finfo(torch.float16).max}

LAMB_AND_ADAM = (
    Case(
        "BERT-large",
        passes,
        {
            "rule": LAMB(0.60466, 0.85437),
            "settings": DECAY_AND_RATIO,
            "shards": (bert(transformer.HIDDEN, transformer.LAYERS, transformer.VOCABULARY),),
        },
        tests=[
            {**SMALL, "settings": RATIO, **edge}
            for edge in (
                {},
                {"rule": LAMB(0.8, 0.95, 1e-4, bias_correction=False), **PARTS},
                {"rule": LAMB(norm_of="model"), "step": 0, "gradient_dtype": torch.float32},
                {"rule": LAMB(0.0, 0.0), "step": 10**6, **ZERO_WEIGHTS},
                {**NO_DIRECTION, "settings": (GroupSettings(1.0, 0.0, True, False), *PLAIN[1:])},
                {"last": math.nan},
                {"skip": True},
            )
        ],
        gpu={"shards": (bert(256, 4, 30522),), "rate": 0.25},
    ),
    Case(
        "Llama-3.1-8B, a layer",
        passes,
        {"rule": AdamW(0.9, 0.95, 1e-5), "settings": DECAY, "shards": (LLAMA_LAYER,)},
        tests=[
            {**SMALL, "settings": PLAIN, **edge}
            for edge in (
                {},
                {"rule": Adam(0.8, 0.99), "step": 0, **PARTS},
                {"rule": Adam(), "last": math.inf},
                {"skip": True},
            )
        ],
        gpu={"shards": (((5_000_000, 0), (4096, 1)),), "rate": 0.25},
    ),
    Case(
        "Llama-3.1-8B, remainders",
        passes,
        {"rule": AdamW(0.9, 0.95, 1e-5), "settings": DECAY, "shards": (LLAMA_LAYER,), "remainders": True},
        tests=[
            {**SMALL, "settings": PLAIN, **edge}
            for edge in ({}, {"rule": Adam(), "gradient_dtype": torch.float32}, {"last": math.nan})
        ],
        dtypes=(torch.bfloat16,),
    ),
    Case(
        "OpenFold, averages",
        passes,
        {"rule": Adam(0.9, 0.999, 1e-6), "settings": DECAY[1:], "shards": (openfold(),), "average": 0.1},
        tests=[
            {**SMALL, "settings": PLAIN, **edge}
            for edge in (
                {"average": 0.75, **PARTS},
                {"average": 1.0, "remainders": True},
                {"rule": LAMB(), "settings": RATIO},
                {"last": math.nan},
                {"skip": True},
            )
        ],
        dtypes=(torch.bfloat16,),
    ),
)

LARS_AND_SGD = (
    Case(
        "ResNet-50",
        passes,
        {
            "rule": LARS(0.9),
            "settings": (GroupSettings(1.0, 5e-5, True, False), *2 * (GroupSettings(1.0, 0.0, False, True),)),
            "shards": resnet(),
        },
        tests=[
            {**SMALL, "rule": LARS(0.9, eta=0.1), "settings": RATIO, **edge}
            for edge in (
                {"settings": RATIO_OUTSIDE},
                {"rule": LARS(0.9, eta=0.1, epsilon=1e-3, norm_of="model"), **PARTS},
                {"rule": SGD(0.9), "settings": PLAIN},
                {"rule": SGD(0.9, nesterov=True), "settings": PLAIN, "gradient_dtype": torch.float32},
                ZERO_WEIGHTS,
                NO_DIRECTION,
                {"last": math.nan},
                {"last": -math.inf},
                {"skip": True},
                {"rule": SGD(0.9), "settings": PLAIN, "skip": True},
            )
        ],
        gpu={"rate": 0.25},
    ),
)

ADAGRAD = (
    Case(
        "DLRM-DCNv2",
        passes,
        {"rule": Adagrad(), "settings": DECAY[1:], "shards": (DLRM,)},
        tests=[
            {**SMALL, "settings": PLAIN, **edge}
            for edge in (
                {"rule": Adagrad(0.1), **PARTS},
                {"state_scale": 0.0, "gradient_dtype": torch.float32},
                NO_DIRECTION,
                {"last": math.nan},
                {"last": -math.inf},
                {"skip": True},
            )
        ],
        gpu={"rate": 0.25},
    ),
)
