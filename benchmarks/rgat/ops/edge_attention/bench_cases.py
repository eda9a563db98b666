"""Attention over the edges of a block like IGBH's, at the three levels of a network."""

from __future__ import annotations

import functools
import itertools

import torch

from benchmarks.rgat.block import Block
from benchmarks.rgat.ops import edge_attention
from benchmarks.rgat.ops.bench_block import FANOUTS, bench_block
from benchmarks.rgat.ops.edge_attention.reference import EdgeAttention
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.dropout.reference import DropoutMask

HEADS, WIDTH = 4, 128
SLOPE, ACTIVATION_SLOPE, PROBABILITY = 0.2, 0.01, 0.2
SEEDS = 2048
"""Of a micro-batch, at which tiles are tried."""


def _moved(block: Block, level: int, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes of forward and backward: a row for each edge, and a number or terms for each edge, target and row."""
    row, terms = HEADS * WIDTH * dtype.itemsize, HEADS * 4
    edges = int(block.edge_counts[level - 1].sum())
    rows = int(block.row_counts[level - 1].sum())
    nodes = int(block.node_counts[level - 1].sum())
    targets = int(block.node_counts[level - 1][list(block.shape.schema.targets)].sum())
    forward = edges * (row + terms + 4) + nodes * row + targets * (2 * terms + 4)
    through_finish = (3 if level > 1 else 1) * nodes * row
    by_target = edges * (row + 3 * terms + 4) + nodes * row + targets * (3 * terms + 4)
    by_row = edges * (row + 2 * terms + 8) + rows * (row + 4)
    return float(forward), float(through_finish + by_target + by_row)


def case(functions: EdgeAttention, level: int, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions around ``batch`` seeds; the last convolution, at level 1, has no activation."""
    device = torch.device(cases.DEVICE)
    block = bench_block(batch, device)
    shape, relations, columns = block.shape, len(block.shape.schema.relations), HEADS * WIDTH
    z_MD = torch.randn((shape.row_offsets(level)[-1], columns), device=device).to(dtype)
    source_term_MA = torch.randn((len(z_MD), HEADS), device=device)
    target_term_TA = torch.randn((shape.target_offsets(level)[-1], HEADS), device=device)
    bias_RD = torch.randn((relations, columns), device=device)
    att_source_RAd = torch.randn((relations, HEADS, WIDTH), device=device)
    seed = torch.tensor(1, device=device)
    options = {
        "slope": SLOPE,
        "activation_slope": ACTIVATION_SLOPE if level > 1 else None,
        "dropout": DropoutMask(PROBABILITY, seed, level) if level > 1 else None,
    }
    inputs = z_MD, source_term_MA, target_term_TA
    out_PD, log_sum_TA = functions.forward(*inputs, bias_RD, block, level, **options)
    dout_PD = torch.randn_like(out_PD)
    moved = _moved(block, level, dtype)
    return [
        Pass("forward", lambda: functions.forward(*inputs, bias_RD, block, level, **options), moved[0]),
        Pass(
            "backward",
            lambda: functions.backward(
                dout_PD, out_PD, *inputs, log_sum_TA, att_source_RAd, block, level, **options, deterministic=True
            ),
            moved[1],
        ),
    ]


def _build(level: int, functions: EdgeAttention, batch: int, dtype: torch.dtype) -> list[Pass]:
    return case(functions, level, batch, dtype)


def entries() -> list[Entry]:
    """Every implementation at every level."""
    implementations, sizes = edge_attention.EDGE_ATTENTION, {"heads": HEADS}
    return [
        entry
        for level in range(len(FANOUTS), 0, -1)
        for entry in each(
            f"edge_attention level {level}", implementations, "triton", sizes, functools.partial(_build, level)
        )
    ]


def sweeps() -> dict[str, Sweep]:
    """Items, edges and warps of every kernel, at the level that takes longest."""
    from benchmarks.rgat.ops.edge_attention import triton

    tried = {
        "forward": ((1,), (2, 4, 8, 16), (1, 2, 4)),
        "gradient": ((32, 64, 128), (1, 2, 4, 8), (2, 4, 8)),
        "targets": ((8, 16, 32, 64), (2, 4, 8, 16), (1, 2, 4)),
        "chunks": ((1, 2, 4, 8), (2, 4, 8), (1, 2, 4)),
        "long_rows": ((8, 32), (16, 32, 64), (2, 4, 8)),
        "rows": ((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)),
    }
    functions = edge_attention.EDGE_ATTENTION.function("triton")
    build = functools.partial(case, functions, len(FANOUTS), SEEDS)
    return {
        f"edge_attention {key}": Sweep(triton.TILES, key, list(itertools.product(*choices)), build, key != "forward")
        for key, choices in tried.items()
    }
