"""Test and benchmark cases of edge attention: a block in IGBH's proportions, at the network's three levels."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.rgat.ops.block_of_cases import FANOUTS, SEEDS, SKEW, block_of_cases, level_of
from benchmarks.rgat.ops.edge_attention.reference import EdgeAttention
from benchmarks.rgat.synthetic import IGBH_EIGHTH
from common.ops.cases import Case, Draw, Pass
from common.ops.dropout.reference import DropoutMask

SLOPE, ACTIVATION_SLOPE, PROBABILITY = 0.2, 0.01, 0.2


def passes(
    function: EdgeAttention,
    draw: Draw,
    level: int,
    heads: int,
    head_size: int,
    seeds: int,
    papers: int,
    fanouts: tuple[int, ...],
    skew: float,
    activation: bool,
    p: float | None,
    compared: bool = False,
) -> list[Pass]:
    """Return the forward and backward pass.

    Bytes include a row for each edge, and indices and terms for each edge, target and row.

    Args:
        level: level of the inputs, which is their distance from the seeds in hops.
        seeds: see :func:`benchmarks.rgat.ops.block_of_cases.block_of_cases`, also for ``papers``, ``fanouts`` and
            ``skew``.
        activation: whether the result goes through a leaky ReLU.
        p: probability of dropout; None for no dropout.
        compared: whether to make results comparable for tests. Forward then also returns the logarithms of sums of
            targets with edges. Backward returns fp32 gradients in the dtype of the activations, because the kernels
            sum rounded values. This takes launches that the bench must not measure.
    """
    block = block_of_cases(draw.device, seeds, papers, fanouts, skew)
    shape, relations, columns = block.shape, len(block.shape.schema.relations), heads * head_size
    filled = level_of(block, level)
    float32 = torch.float32
    z = filled.rows.only(draw.normal(shape.row_offsets(level)[-1], columns))
    source_term = filled.rows.only(draw.normal(len(z), heads, dtype=float32))
    target_term = filled.targets.only(draw.normal(shape.target_offsets(level)[-1], heads, dtype=float32))
    bias = draw.normal(relations, columns, dtype=float32)
    att_source = draw.normal(relations, heads, head_size, dtype=float32)
    dout = filled.outputs.only(draw.normal(shape.node_offsets(level - 1)[-1], columns))
    options: dict[str, Any] = {
        "slope": SLOPE,
        "activation_slope": ACTIVATION_SLOPE if activation else None,
        "dropout": None if p is None else DropoutMask(p, draw.seed(), level),
    }
    inputs = z, source_term, target_term
    out, log_sum = function.forward(*inputs, bias, block, level, **options)
    degrees = [
        block.indptr[first : first + count + 1].diff()
        for first, count in zip(shape.indptr_offsets, filled.targets.counts, strict=False)
    ]

    def forward() -> Any:
        found, sums = function.forward(*inputs, bias, block, level, **options)
        if not compared:
            return found
        return found, [each[degree > 0] for each, degree in zip(filled.targets.views(sums), degrees, strict=True)]

    def backward() -> Any:
        dz, *others = function.backward(
            dout, out, *inputs, log_sum, att_source, block, level, **options, deterministic=True
        )
        return filled.rows.views(dz), [each.to(z.dtype) for each in others] if compared else others

    row, terms = columns * z.element_size(), heads * 4
    edges, nodes = int(block.edge_counts[level - 1].sum()), filled.outputs.total
    rows, targets = filled.rows.total, filled.targets.total
    through_finish = (3 if activation else 1) * nodes * row
    by_target = edges * (row + 3 * terms + 4) + nodes * row + targets * (3 * terms + 4)
    by_row = edges * (row + 2 * terms + 8) + rows * (row + 4)
    return [
        Pass("forward", forward, float(edges * (row + terms + 4) + nodes * row + targets * (2 * terms + 4))),
        Pass("backward", backward, float(through_finish + by_target + by_row)),
    ]


SIZES = {
    "heads": 4,
    "head_size": 128,
    "seeds": SEEDS,
    "papers": IGBH_EIGHTH,
    "fanouts": FANOUTS,
    "skew": SKEW,
    "activation": True,
    "p": PROBABILITY,
}
LAST = {**SIZES, "activation": False, "p": None}
FEW = {"seeds": 1, "papers": 60, "fanouts": (3, 1, 1), "compared": True}
HUB = {**FEW, "seeds": 36, "fanouts": (8, 1, 1), "skew": 0.95}
"""Sizes with most edges at one node, so its list of edges spans several chunks. Level 1 uses the first entries."""

GPU = {"seeds": 64, "papers": IGBH_EIGHTH // 16, "compared": True}
DTYPES = (torch.float32, torch.bfloat16)

CASES = (
    Case(
        "first convolution",
        passes,
        {**SIZES, "level": 3},
        tests=[{**FEW, "head_size": 8}],
        gpu=GPU,
        dtypes=DTYPES,
        tolerance=3.0,
    ),
    Case(
        "second convolution",
        passes,
        {**SIZES, "level": 2},
        tests=[{**FEW, "heads": 8, "head_size": 1, "p": 0.0}],
        gpu=GPU,
        dtypes=DTYPES,
        tolerance=3.0,
    ),
    Case(
        "last convolution",
        passes,
        {**LAST, "level": 1},
        tests=[{**HUB, "heads": 1, "head_size": 3}, {**FEW, "heads": 2, "head_size": 256}],
        gpu=GPU,
        dtypes=DTYPES,
        tolerance=3.0,
    ),
)
