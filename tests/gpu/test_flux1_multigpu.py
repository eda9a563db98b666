"""Test that FLUX.1 trains on GPUs that share layers or optimizer state as on one GPU, eagerly and captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.flux1.workload import FluxTraining
from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from common.step.graphs import StepRunner
from tests.benchmarks.flux1.flux_ranks import batch_of

pytestmark = pytest.mark.multigpu

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"shard": {"dp": 2}, "tp2": {"tp": 2}},
    4: {"shard": {"dp": 4}, "tp2, two replicas": {"dp": 2, "tp": 2}},
}
"""Number of GPUs to sizes of the axes by case."""
CUDA_GRAPHS = {"eager": "false", "captured": "true"}
OF_A_STEP, STEPS = 8, 3
CLOSE = 1e-9
"""Largest difference of float64 weights. Gradients are summed in another order."""
SMALL = (
    "scale=test", "precision=fp64", "model.zero_std=0.1", "hparams.warmup_steps=0",
    "benchmark.facts.max_grad_norm=0.05",
)  # fmt: skip
"""The small network; each step clips its gradient."""
REAL = (
    "scale=2xH200", "scale.nodes=1", "precision=bf16", "model.double_blocks=1", "model.single_blocks=1",
    "model.zero_std=0.02", "hparams.warmup_steps=0", "submission.division=open", "optimizer.masters=fp32",
)  # fmt: skip
"""A block of each kind of the real network."""


def trained(layout: Layout, graphs: str, *overrides: str) -> tuple[FluxTraining, list[float]]:
    """Return the workload after some steps, and the losses of the steps."""
    replicas, replica = layout.size("dp"), layout.coordinate("dp")
    count = OF_A_STEP // 2 // replicas
    run, _ = cli.load(
        compose([
            "benchmark=flux1", *overrides, f"scale.gpus_per_node={layout.world_size}",
            f"layout.tp={layout.size('tp')}", f"micro_batch={count}", f"hparams.global_batch_size={OF_A_STEP}",
            "optimizer.shard=all", f"cuda_graphs={graphs}",
        ])
    )  # fmt: skip
    workload = FluxTraining(run, layout)
    step = workload.build_step()
    runner = StepRunner(step, workload.model, run.grad_accumulation_steps, run.cuda_graphs)
    runner.warm_up(workload.example_batches())
    losses = []
    with runner.on_stream():
        for iteration in range(STEPS):
            firsts = [iteration * OF_A_STEP + half * OF_A_STEP // 2 + replica * count for half in range(2)]
            result = runner([batch_of(workload, range(first, first + count), OF_A_STEP // 2) for first in firsts])
            losses.append(step.read(result.names, result.values.tolist()).metrics["loss"])
        workload.weights()
    assert not runner.uncaptured
    runner.close()
    return workload, losses


def own_of(whole: FluxTraining, part: FluxTraining, name: str) -> Tensor:
    """Return the part of a weight of ``whole`` that the rank of ``part`` holds."""
    full, split = whole.model.get_parameter(name).detach(), part.tensor_splits().get(name)
    return full if split is None else split.local_of(full)


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    found: dict[str, Any] = {}
    alone, wanted = trained(Layout(device=device, seed=7), "false", *SMALL)
    _, in_half = trained(Layout(device=device, seed=7), "false", *REAL)
    for name, axes in LAYOUTS[world].items():
        for mode, graphs in CUDA_GRAPHS.items():
            own, losses = trained(Layout(axes, rank, device, seed=7), graphs, *SMALL)
            named = dict(own.model.named_parameters())
            _, half = trained(Layout(axes, rank, device, seed=7), graphs, *REAL)
            found[f"{name}, {mode}"] = {
                "weights": max((named[n] - own_of(alone, own, n)).abs().max().item() for n in named),
                "losses": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
                "losses in bf16": max(abs(a / b - 1) for a, b in zip(half, in_half, strict=True)),
            }
            torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize("mode", list(CUDA_GRAPHS))
def test_ranks_train_as_one_gpu(ranks, mode):
    for name in LAYOUTS[len(ranks)]:
        for found in ranks:
            differences = found[f"{name}, {mode}"]
            assert differences["weights"] < CLOSE, (name, differences)
            assert differences["losses"] < 5e-6, (name, differences)  # read in float32
            assert differences["losses in bf16"] < 5e-3, (name, differences)
