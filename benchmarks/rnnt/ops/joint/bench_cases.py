"""The joint network's hidden layer for micro-batches of LibriSpeech's lengths."""

from __future__ import annotations

import functools
import itertools

import torch

from benchmarks.rnnt.ops import joint
from benchmarks.rnnt.ops.bench_rows import bench_rows
from benchmarks.rnnt.ops.joint import JointPasses
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.dropout.reference import DropoutMask

UTTERANCES = 192
"""Of a micro-batch, at which tiles are tried."""


def case(passes: JointPasses, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Forward writes rows, and backward reads those of their gradient."""
    given = bench_rows(batch, torch.device(cases.DEVICE))
    rows, width = given.rows, given.facts.joint_width
    f, g = (
        torch.randn((size, batch, width), device=cases.DEVICE, dtype=dtype)
        for size in (rows.most_frames, rows.most_tokens + 1)
    )
    dropout = DropoutMask(given.facts.joint_dropout, torch.zeros((), dtype=torch.int64, device=cases.DEVICE), 0)
    h = passes.forward(f, g, rows, dropout)
    moved = float((given.used * width + f.numel() + g.numel()) * dtype.itemsize)
    return [
        Pass("forward", lambda: passes.forward(f, g, rows, dropout), moved),
        Pass("backward", lambda: passes.backward(h, None, None, len(f), len(g), rows, dropout), moved),
    ]


def entries() -> list[Entry]:
    """Every implementation."""
    from benchmarks.rnnt.config import Facts

    sizes = {"width": fixed_facts(Facts, "rnnt").joint_width}
    return each("joint", joint.JOINT, "triton", sizes, case)


def sweeps() -> dict[str, Sweep]:
    """Frames, warps and stages."""
    from benchmarks.rnnt.ops.joint import triton

    choices: dict[str, list[tuple[int, ...]]] = {
        "forward": [(2, 2), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4)],
        "backward": [(8, 1, 1), (8, 2, 1), (8, 2, 2), (8, 2, 3), (16, 2, 1), (16, 2, 2)],
        "columns": list(itertools.product((2, 4, 8), (2, 4))),
    }
    build = functools.partial(case, joint.JOINT.function("triton"), UTTERANCES)
    return {f"joint {key}": Sweep(triton.TILES, key, choices[key], build, key != "forward") for key in choices}
