"""One rank of the group batch norm test."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from batch_norm_oracle import KINDS, inputs, run

from common.ops import batch_norm

RANKS = 2
SHAPE = (6, 16, 5, 4)
SPLIT = (4, 2)  # images of each rank: the parts need not be equal


def run_rank(rank: int, folder: str, implementation: str) -> None:
    """Run every kind on this rank's part of the batch and save what came out.

    Triton's kernels are interpreted: :mod:`tests.preloaded` has imported Triton so.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=timedelta(seconds=200)
    )
    operations = SimpleNamespace(
        batch_norm=batch_norm.BATCH_NORM.function(implementation),
        batch_norm_add_relu=batch_norm.BATCH_NORM_ADD_RELU.function(implementation),
        batch_norm_relu_max_pool=batch_norm.BATCH_NORM_RELU_MAX_POOL.function(implementation),
    )
    x, residual = (value.split(SPLIT)[rank] for value in inputs(SHAPE, torch.float32))
    found = {kind: run(operations, kind, x, residual, dist.group.WORLD) for kind in KINDS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
