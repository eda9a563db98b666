"""Iterations of the ``test`` recipe of FLUX.1 on gloo ranks that share the samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.flux1.workload import FluxTraining
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout

ITERATIONS = 3
STREAMS = 8
"""Micro-batches of one sample per iteration, over all ranks."""
SHARDS = {2: "all", 4: "all", 8: "node"}
"""Option ``optimizer.shard`` by the number of ranks."""


def loaded(*overrides: str) -> tuple[RunConfig, SessionConfig]:
    """Return the settings of FLUX.1 with overrides."""
    return loading.load(compose(["benchmark=flux1", "device=cpu", *overrides]), lambda _: FluxTraining)


def batch_of(workload: FluxTraining, ids: Sequence[int], samples: int = 0) -> Batch:
    """Return a batch of samples that depend only on their ids."""
    facts = workload.own.facts
    latent = (facts.latent_channels, facts.latent_size, facts.latent_size)
    shapes = {"t5": (facts.text_length, facts.text_width), "clip": (facts.caption_width,), "mean": latent}
    made: dict[str, list[Tensor]] = {name: [] for name in (*shapes, "logvar")}
    for sample in ids:
        generator = torch.Generator().manual_seed(sample)
        for name, shape in {**shapes, "logvar": latent}.items():
            made[name].append(torch.randn(shape, generator=generator))
    tensors = {name: torch.stack(each) for name, each in made.items()}
    return workload.prepare(HostBatch({**tensors, "sample_ids": torch.tensor(ids)}, samples or len(ids), 0))


def train(world: int, rank: int, shard: str, *overrides: str) -> dict[str, Tensor]:
    """Return the weights after some iterations in fp64, in which the gradient is clipped."""
    run, _ = loaded(
        "scale=test", f"scale.gpus_per_node={world}", "micro_batch=1", "precision=fp64", f"optimizer.shard={shard}",
        "optimizer.bucket_mb=0.01", "model.zero_std=0.1", f"hparams.global_batch_size={STREAMS}",
        "benchmark.facts.max_grad_norm=0.1", *overrides,
    )  # fmt: skip
    workload = FluxTraining(run, Layout(run.layout, rank, seed=7))
    step = workload.build_step()
    for iteration in range(ITERATIONS):
        # stream a * R + r is accumulation step a of replica r of R
        streams = range(rank, STREAMS, world)
        step([batch_of(workload, [iteration * STREAMS + stream], STREAMS) for stream in streams])
    return {name: tensor.clone() for name, tensor in workload.weights().tensors.items()}


def run_rank(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Return the final weights of this rank."""
    return train(world, rank, SHARDS[world])
