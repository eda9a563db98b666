"""The products of R-GAT's three convolutions: the first from features in e4m3, the others from what one before gave."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.ops import bench_blocks as size
from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.projection.plain import Projection, project_stock
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

SEEDS = 2048
"""At which tiles are tried."""

LEVELS = (3, 2, 1)
"""Of the convolutions, the first first."""


class Given(NamedTuple):
    """What the functions get, in their order."""

    x_NK: Tensor
    weight_RKD: Tensor
    att_source_RAd: Tensor
    v_RKA: Tensor
    dz_MD: Tensor
    dterm_TA: Tensor


def _given(seeds: int, level: int, dtype: torch.dtype) -> Given:
    shape, relations = size.shape(seeds), len(size.SCHEMA.relations)
    inputs = size.FEATURES if level == shape.hops else size.HIDDEN

    def normal(*lengths: int) -> Tensor:
        return torch.randn(lengths, device=cases.DEVICE, dtype=dtype)

    x_NK = normal(shape.node_offsets(level)[-1], inputs)
    return Given(
        x_NK.to(torch.float8_e4m3fn) if level == shape.hops else x_NK,
        normal(relations, inputs, size.HIDDEN) * inputs**-0.5,
        normal(relations, size.HEADS, size.HEAD_SIZE).float(),
        normal(relations, inputs, size.HEADS).float(),
        normal(shape.row_offsets(level)[-1], size.HIDDEN),
        normal(shape.target_offsets(level)[-1], size.HEADS).float(),
    )


def case(level: int, function: Projection, seeds: int, dtype: torch.dtype) -> list[Pass]:
    """One convolution. Bytes are those of what is filled, and each input of a function is read once."""
    block, given = size.block(seeds), _given(seeds, level, dtype)
    x, weight, att, v, dz, dterm = given
    rows, pairs = sum(size.rows(seeds)[level - 1]), sum(size.targets(seeds, level))
    targets, inputs = sum(size.nodes(seeds)[level - 1]), x.shape[1]
    x_row, z_row, term_row = inputs * x.element_size(), size.HIDDEN * dtype.itemsize, 4 * size.HEADS
    weights = float(weight.numel() * weight.element_size())
    products, vectors = 2.0 * rows * inputs * size.HIDDEN, 2.0 * pairs * inputs * size.HEADS
    projected = rows * (4 + x_row + z_row) + weights
    read_terms = float(targets * x_row + pairs * term_row)
    passes = [
        Pass("forward", lambda: function.project(x, block, level, weight, att), projected + rows * term_row, products),
        Pass("weight gradient", lambda: function.weight_gradient(x, dz, block, level, dtype), projected, products),
        Pass("terms", lambda: function.target_terms(x, block, level, v), read_terms, vectors),
        Pass("terms gradient", lambda: function.target_terms_gradient(x, dterm, block, level), read_terms, vectors),
    ]
    if level < size.shape(seeds).hops:
        moved = rows * z_row + pairs * term_row + sum(size.nodes(seeds)[level]) * (inputs * dtype.itemsize) + weights
        run = functools.partial(function.input_gradient, dz, dterm, block, level, weight, v)
        passes.append(Pass("input gradient", run, moved, products + vectors))
    return passes


def stock(level: int, seeds: int, dtype: torch.dtype) -> list[Pass]:
    """The projection alone, of every node for every relation of its type; FLOP are those that the rows need."""
    block, given = size.block(seeds), _given(seeds, level, dtype)
    rows, inputs = sum(size.rows(seeds)[level - 1]), given.x_NK.shape[1]
    run = functools.partial(project_stock, given.x_NK, block, level, given.weight_RKD, given.att_source_RAd)
    moved = float(rows * (inputs * given.x_NK.element_size() + size.HIDDEN * dtype.itemsize))
    return [Pass("forward", run, moved, 2.0 * rows * inputs * size.HIDDEN)]


def entries() -> list[Entry]:
    """Every implementation of every convolution."""
    sizes = {"heads": size.HEADS, "head_size": size.HEAD_SIZE}
    found = []
    for number, level in enumerate(LEVELS):
        name = f"products of convolution {number}"
        build = functools.partial(case, level)
        found += each(name, projection.IMPLEMENTATIONS, "triton", sizes, build)
        found.append(Entry(f"{name} stock", 0, functools.partial(stock, level)))
    return found


def _pass(level: int, direction: str, dtype: torch.dtype) -> list[Pass]:
    passes = case(level, projection.IMPLEMENTATIONS["triton"].function, SEEDS, dtype)
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
