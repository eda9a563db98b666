"""Test and benchmark cases of the products of R-GAT's three convolutions. Only the first has e4m3 inputs."""

from __future__ import annotations

import torch

from benchmarks.rgat.ops.block_of_cases import FANOUTS, SEEDS, block_of_cases, level_of
from benchmarks.rgat.ops.projection.reference import Projection
from benchmarks.rgat.synthetic import IGBH_EIGHTH
from common.ops.cases import Case, Draw, Pass, size_of

HEADS, HEAD_SIZE, FEATURES = 4, 128, 1024


def passes(
    function: Projection,
    draw: Draw,
    level: int,
    inputs: int,
    heads: int,
    head_size: int,
    seeds: int,
    papers: int,
    fanouts: tuple[int, ...],
    fp8: bool,
) -> list[Pass]:
    """Return the passes of a convolution. Bytes count only filled entries, with each input of a function read once.

    Args:
        level: level of the inputs, which is their distance from the seeds in hops.
        inputs: features per node.
        fp8: whether features are in e4m3.
    """
    block = block_of_cases(draw.device, seeds, papers, fanouts)
    shape, relations, hidden = block.shape, len(block.shape.schema.relations), heads * head_size
    filled = level_of(block, level)
    float32 = torch.float32
    x = filled.nodes.only(draw.normal(shape.node_offsets(level)[-1], inputs))
    x = draw.rounded(x, torch.float8_e4m3fn) if fp8 else x
    weight = draw.normal(relations, inputs, hidden, scale=inputs**-0.5)
    att = draw.normal(relations, heads, head_size, scale=head_size**-0.5, dtype=float32)
    v = draw.normal(relations, inputs, heads, scale=inputs**-0.5, dtype=float32)
    dz = filled.rows.only(draw.normal(shape.row_offsets(level)[-1], hidden))
    dterm = filled.targets.only(draw.normal(shape.target_offsets(level)[-1], heads, dtype=float32))

    def project() -> object:
        found = function.project(x, block, level, weight, att)
        return filled.rows.views(found.z_MD), filled.rows.views(found.source_term_MA)

    def input_gradient() -> object:
        return filled.nodes.views(function.input_gradient(dz, dterm, block, level, weight, v))

    rows, pairs = filled.rows.total, filled.targets.total
    x_row, z_row, term_row = inputs * x.element_size(), hidden * dz.element_size(), 4 * heads
    products, vectors = 2.0 * rows * inputs * hidden, 2.0 * pairs * inputs * heads
    projected = rows * (4 + x_row + z_row) + size_of(weight)
    read_terms = float(filled.outputs.total * x_row + pairs * term_row)
    found = [
        Pass("forward", project, projected + rows * term_row, products),
        Pass(
            "weight gradient",
            lambda: function.weight_gradient(x, dz, block, level, dz.dtype),
            projected,
            products,
        ),
        Pass("terms", lambda: filled.targets.views(function.target_terms(x, block, level, v)), read_terms, vectors),
        Pass("terms gradient", lambda: function.target_terms_gradient(x, dterm, block, level), read_terms, vectors),
    ]
    if level < shape.hops:
        dx = filled.nodes.total * inputs * dz.element_size()
        moved = rows * z_row + pairs * term_row + dx + size_of(weight)
        found.append(Pass("input gradient", input_gradient, moved, products + vectors))
    return found


SIZES = {"heads": HEADS, "head_size": HEAD_SIZE, "seeds": SEEDS, "papers": IGBH_EIGHTH, "fanouts": FANOUTS}
RESULTS = {**SIZES, "inputs": HEADS * HEAD_SIZE, "fp8": False}
FEW = {"seeds": 3, "papers": 600, "fanouts": (8, 8, 1)}
GPU = {"seeds": 64, "papers": IGBH_EIGHTH // 16}

CASES = (
    Case(
        "first convolution",
        passes,
        {**SIZES, "level": 3, "inputs": FEATURES, "fp8": True},
        tests=[{**FEW, "inputs": 84, "heads": 3, "head_size": 16}],
        gpu=GPU,
        dtypes=(torch.bfloat16,),
        tf32=True,
    ),
    Case(
        "second convolution",
        passes,
        {**RESULTS, "level": 2},
        tests=[{**FEW, "inputs": 140, "heads": 2, "head_size": 24}, {**FEW, "inputs": 20, "heads": 9, "head_size": 32}],
        gpu=GPU,
        dtypes=(torch.float32, torch.bfloat16),
        tf32=True,
    ),
    Case(
        "third convolution",
        passes,
        {**RESULTS, "level": 1},
        tests=[{**FEW, "inputs": 20, "head_size": 16, "heads": 1}],
        gpu=GPU,
        dtypes=(torch.float32, torch.bfloat16),
        tf32=True,
    ),
)
