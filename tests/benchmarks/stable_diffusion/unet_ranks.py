"""Iterations of the ``test`` recipe on gloo ranks that share the samples."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.stable_diffusion.workload import StableDiffusion
from common.config import loading
from common.config.composition import compose
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout

ITERATIONS = 3
STREAMS = 4
"""Micro-batches of one sample per iteration, over all ranks."""
SHARDS = {2: "none", 4: "all"}
"""Option ``optimizer.shard`` by the number of ranks."""


def train(world: int, rank: int, shard: str) -> dict[str, Tensor]:
    """Return the weights after some iterations in fp64."""
    given = ["benchmark=stable_diffusion", "scale=test", "device=cpu", f"scale.gpus_per_node={world}", "micro_batch=1"]
    given += ["precision=fp64", f"optimizer.shard={shard}", "optimizer.bucket_mb=0.01", "model.zero_std=0.1"]
    given += ["hparams.warmup_steps=0", f"hparams.global_batch_size={STREAMS}"]
    run, _ = loading.load(compose(given), lambda _: StableDiffusion)
    layout = Layout(run.layout, rank, seed=7)
    workload = StableDiffusion(run, layout)
    step = workload.build_step()
    for iteration in range(ITERATIONS):
        # stream a * R + r is accumulation step a of replica r of R
        step([sample(workload, iteration * STREAMS + stream) for stream in range(rank, STREAMS, world)])
    return {name: tensor.clone() for name, tensor in workload.weights().tensors.items()}


def sample(workload: StableDiffusion, number: int) -> Batch:
    """Return a micro-batch of one sample that depends only on its number."""
    facts, generator = workload.own.facts, torch.Generator().manual_seed(number)
    size = facts.latent_size
    made = {
        "moments": torch.randn((1, 2 * facts.latent_channels, size, size), generator=generator),
        "context": torch.randn((1, facts.context_length, facts.context_width), generator=generator),
        "sample_ids": torch.tensor([number]),
    }
    return workload.prepare(HostBatch(made, STREAMS, 0))


def run_rank(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Return the final weights of this rank."""
    return train(world, rank, SHARDS[world])
