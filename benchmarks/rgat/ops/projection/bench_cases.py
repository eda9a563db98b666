"""The products of R-GAT's three convolutions: the first from features in e4m3, the others from what one before gave."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.block import Block
from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.bench_block import FANOUTS, bench_block
from benchmarks.rgat.ops.projection.reference import Projection, project_stock
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

HEADS, HEAD_SIZE, FEATURES = 4, 128, 1024
SEEDS = 2048
"""Of a micro-batch, at which tiles are tried."""

LEVELS = tuple(range(len(FANOUTS), 0, -1))
"""Of the convolutions, the first first."""


class Given(NamedTuple):
    """What the functions get, in their order."""

    x_NK: Tensor
    weight_RKD: Tensor
    att_source_RAd: Tensor
    v_RKA: Tensor
    dz_MD: Tensor
    dterm_TA: Tensor


def _given(block: Block, level: int, dtype: torch.dtype) -> Given:
    shape, relations, hidden = block.shape, len(block.shape.schema.relations), HEADS * HEAD_SIZE
    inputs = FEATURES if level == shape.hops else hidden

    def normal(*lengths: int) -> Tensor:
        return torch.randn(lengths, device=cases.DEVICE, dtype=dtype)

    x_NK = normal(shape.node_offsets(level)[-1], inputs)
    return Given(
        x_NK.to(torch.float8_e4m3fn) if level == shape.hops else x_NK,
        normal(relations, inputs, hidden) * inputs**-0.5,
        normal(relations, HEADS, HEAD_SIZE).float(),
        normal(relations, inputs, HEADS).float(),
        normal(shape.row_offsets(level)[-1], hidden),
        normal(shape.target_offsets(level)[-1], HEADS).float(),
    )


def case(level: int, function: Projection, seeds: int, dtype: torch.dtype) -> list[Pass]:
    """One convolution. Bytes are those of what is filled, and each input of a function is read once."""
    block = bench_block(seeds, torch.device(cases.DEVICE))
    x, weight, att, v, dz, dterm = _given(block, level, dtype)
    nodes = block.node_counts.tolist()
    rows, pairs = int(block.row_counts[level - 1].sum()), sum(nodes[level - 1][t] for t in block.shape.schema.targets)
    targets, inputs, hidden = sum(nodes[level - 1]), x.shape[1], dz.shape[1]
    x_row, z_row, term_row = inputs * x.element_size(), hidden * dtype.itemsize, 4 * HEADS
    weights = float(weight.numel() * weight.element_size())
    products, vectors = 2.0 * rows * inputs * hidden, 2.0 * pairs * inputs * HEADS
    projected = rows * (4 + x_row + z_row) + weights
    read_terms = float(targets * x_row + pairs * term_row)
    passes = [
        Pass("forward", lambda: function.project(x, block, level, weight, att), projected + rows * term_row, products),
        Pass("weight gradient", lambda: function.weight_gradient(x, dz, block, level, dtype), projected, products),
        Pass("terms", lambda: function.target_terms(x, block, level, v), read_terms, vectors),
        Pass("terms gradient", lambda: function.target_terms_gradient(x, dterm, block, level), read_terms, vectors),
    ]
    if level < block.shape.hops:
        moved = rows * z_row + pairs * term_row + sum(nodes[level]) * (inputs * dtype.itemsize) + weights
        run = functools.partial(function.input_gradient, dz, dterm, block, level, weight, v)
        passes.append(Pass("input gradient", run, moved, products + vectors))
    return passes


def stock(level: int, seeds: int, dtype: torch.dtype) -> list[Pass]:
    """The projection alone, of every node for every relation of its type; FLOP are those that the rows need."""
    block = bench_block(seeds, torch.device(cases.DEVICE))
    given = _given(block, level, dtype)
    rows, inputs, hidden = int(block.row_counts[level - 1].sum()), given.x_NK.shape[1], given.dz_MD.shape[1]
    run = functools.partial(project_stock, given.x_NK, block, level, given.weight_RKD, given.att_source_RAd)
    moved = float(rows * (inputs * given.x_NK.element_size() + hidden * dtype.itemsize))
    return [Pass("forward", run, moved, 2.0 * rows * inputs * hidden)]


def entries() -> list[Entry]:
    """Every implementation of every convolution."""
    sizes = {"heads": HEADS, "head_size": HEAD_SIZE}
    found = []
    for number, level in enumerate(LEVELS):
        name = f"products of convolution {number}"
        build = functools.partial(case, level)
        found += each(name, projection.PROJECTION, "triton", sizes, build)
        found.append(Entry(f"{name} stock", 0, functools.partial(stock, level)))
    return found


def _pass(level: int, direction: str, dtype: torch.dtype) -> list[Pass]:
    passes = case(level, projection.PROJECTION.function("triton"), SEEDS, dtype)
    return [next(own for own in passes if own.name == direction)]


def sweeps() -> dict[str, Sweep]:
    """Tiles of each kernel in the first two convolutions."""
    from benchmarks.rgat.ops.projection import triton

    sides = [(128, 256, 8), (256, 128, 8), (128, 128, 4), (128, 128, 8), (64, 256, 4)]
    products: list[tuple[int, ...]] = [
        (rows, columns, depth, warps, stages)
        for (rows, columns, warps), depth, stages in itertools.product(sides, (32, 64, 128), (2, 3, 4, 5))
    ]
    sums: list[tuple[int, ...]] = [
        (rows, columns, depth, warps, stages, programs)
        for (depth, columns, warps), rows, stages, programs in itertools.product(sides, (32, 64), (3, 4, 5, 6), (8, 16))
    ]
    terms: list[tuple[int, ...]] = [
        (rows, 0, depth, warps, stages)
        for rows, depth, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5))
    ]
    term_sums: list[tuple[int, ...]] = [
        (rows, 0, depth, 4, stages, programs)
        for rows, depth, stages, programs in itertools.product((32, 64, 128), (64, 128), (2, 3, 4, 5), (4, 8, 16))
    ]
    kernels: dict[str, tuple[str, list[tuple[int, ...]]]] = {
        "forward": ("rows", products),
        "weight gradient": ("weight_gradient", sums),
        "terms": ("terms", terms),
        "terms gradient": ("terms_gradient", term_sums),
        "input gradient": ("input_gradient", products),
    }
    return {
        f"products {direction} of convolution {number}": Sweep(
            triton.TILES, key, choices, functools.partial(_pass, level, direction), False
        )
        for number, level in enumerate(LEVELS[:2])
        for direction, (key, choices) in kernels.items()
        if direction != "input gradient" or number
    }
