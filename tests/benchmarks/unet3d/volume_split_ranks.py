"""A rank of the tests of operations on split volumes: it runs implementations on its slab and saves the results."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm
from common.distributed.spatial.split import VolumeSplit

EPSILON = 1e-5
SMOOTH = 1e-6


def slab(whole: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """Return this rank's part of the planes."""
    return whole.chunk(ranks, dim)[rank].contiguous()


def normalised(case: dict[str, Tensor], implementation: str, split: VolumeSplit) -> dict[str, Tensor]:
    """Return the instance norm of the slab and its gradients."""
    x, dy = (slab(case[name], split.index, split.ranks, 2) for name in ("x", "dy"))
    leaves = [value.clone().requires_grad_() for value in (x, case["weight"], case["bias"])]
    results = instance_norm.INSTANCE_NORM.function(implementation)(*leaves, EPSILON, split)
    y = results[0]
    gradients = torch.autograd.grad(results, leaves, (dy / 4, 3 * dy / 4))
    return {"y": y.detach(), **dict(zip(("x", "weight", "bias"), gradients, strict=True))}


def lost(case: dict[str, Tensor], implementation: str, split: VolumeSplit) -> dict[str, Tensor]:
    """Return the loss of whole volumes and its gradient for the slab."""
    logits = slab(case["logits"], split.index, split.ranks, 2).requires_grad_()
    label = slab(case["label"], split.index, split.ranks, 1)
    loss = dice_cross_entropy.DICE_CROSS_ENTROPY.function(implementation)(logits, label, SMOOTH, split)
    (gradient,) = torch.autograd.grad(loss, logits)
    return {"loss": loss.detach(), "logits": gradient}


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """Run the cases of ``folder/cases.pt``; :mod:`tests.preloaded` has imported Triton for interpretation."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=timedelta(seconds=200)
    )
    assert dist.group.WORLD is not None
    split = VolumeSplit(ranks, rank, group=dist.group.WORLD)
    given = torch.load(f"{folder}/cases.pt")
    found = {
        operation: {name: run(case, name, split) for name in given["implementations"][operation]}
        for operation, run, case in (("norm", normalised, given["norm"]), ("loss", lost, given["loss"]))
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
