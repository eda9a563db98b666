"""FLUX.1 on gloo ranks that share its layers; test_flux1_split.py compares them with one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from flux_ranks import batch_of, loaded
from torch import Tensor

from benchmarks.flux1.workload import FluxTraining
from common.distributed.layout import Layout

LAYOUTS: dict[int, tuple[str, ...]] = {1: (), 2: ("layout.tp=2",), 4: ("layout.tp=2", "optimizer.shard=all")}
"""Settings by the number of ranks."""
SAMPLES = 4
"""Samples of a micro-batch over the replicas, of an evaluation batch, and of half an iteration."""
STEPS = 2


def built(world: int, rank: int) -> FluxTraining:
    """Return the workload in fp64; no weight is constant, and each step clips its gradient."""
    run, _ = loaded(
        "scale=test", f"scale.gpus_per_node={world}", "precision=fp64", "model.zero_std=0.1",
        f"hparams.global_batch_size={2 * SAMPLES}", f"micro_batch={SAMPLES * 2 // max(2, world)}",
        "benchmark.facts.heads=2", "benchmark.facts.max_grad_norm=0.05", *LAYOUTS[world],
    )  # fmt: skip
    return FluxTraining(run, Layout(run.layout, rank, seed=7))


def whole(workload: FluxTraining, tensors: dict[str, Tensor], sums: bool) -> dict[str, Tensor]:
    """Return whole tensors, which depend on no other rank. ``sums``: shared ones have a part of a sum on each rank."""
    splits, group, found = workload.tensor_splits(), workload.layout.group("tp"), {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone()
        if name in splits:
            found[name] = splits[name].gather(found[name], group, torch.device("cpu"))
        elif sums and workload.parallel.size > 1:
            dist.all_reduce(found[name], group=group)
    return found


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return losses and gradients of the samples of this replica, and the weights after some iterations."""
    workload = built(world, rank)
    replicas, replica = workload.layout.size("dp"), workload.layout.index("dp")
    parameters = dict(workload.model.named_parameters())
    initial = whole(workload, {name: each.detach() for name, each in parameters.items()}, sums=False)
    seed, ids = torch.tensor(3), list(range(SAMPLES))
    losses_N = workload.sample_losses(batch_of(workload, ids).tensors, seed)
    (losses_N * torch.arange(1.0, SAMPLES + 1)).sum().backward()
    gradients = whole(workload, {name: each.grad for name, each in parameters.items() if each.grad is not None}, True)
    times_N = torch.tensor([0.0, 0.25, 0.5, 0.875], dtype=torch.float64)
    with torch.no_grad():
        at_times_N = workload.sample_losses(batch_of(workload, ids).tensors, seed, times_N)
    workload.model.zero_grad()
    step = workload.build_step()
    count = SAMPLES // replicas
    for iteration in range(STEPS):
        firsts = [(2 * iteration + half) * SAMPLES + replica * count for half in range(2)]
        step([batch_of(workload, range(first, first + count), SAMPLES) for first in firsts])
    weights = whole(workload, {name: workload.weights().tensors[name] for name in parameters}, sums=False)
    return {
        "initial": initial, "losses": losses_N.detach(), "gradients": gradients, "at times": at_times_N,
        "weights": weights,
    }  # fmt: skip
