"""Train workloads on ranks of this machine that act as several nodes, or as one, for tests on CPUs and GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch

from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import MACHINE_VARIABLE
from common.step.graphs import StepRunner

STEPS = 3
GPT3 = ("benchmark=gpt3", "precision=fp64", "benchmark.facts.warmup_samples=0")
CASES: dict[str, tuple[str, ...]] = {
    "data parallelism": ("benchmark=resnet",),
    "sharded optimizer": ("benchmark=resnet", "optimizer.shard=all", "optimizer.bucket_mb=0.1"),
    "pipeline": (*GPT3, "layout.pp=2"),
    "tensor parallelism": (*GPT3, "layout.tp=2"),
    "exchange of embeddings": ("benchmark=dlrm_dcnv2", "embeddings.plan=row_wise"),
    "adapters": ("benchmark=llama2_70b_lora",),
}
"""What the ranks exchange -> overrides of the ``test`` recipe for two ranks."""


def act_as_node(rank: int) -> None:
    """Let this rank be a node of its own for NCCL and for symmetric memory. Call before a process group exists."""
    os.environ[MACHINE_VARIABLE] = f"node {rank}"


def acts_as_node() -> bool:
    """Return whether :func:`act_as_node` was called in this process."""
    return MACHINE_VARIABLE in os.environ


def trained(case: str, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Train on the workload's example batch, in a CUDA graph where the device can.

    Returns:
        ``losses``: list of the steps' losses. ``changes``: name to float64 tensor, the change of every trained tensor
        and of the state. ``gradient_bytes``: size of all gradients.
    """
    machines = world if acts_as_node() else 1
    run, _ = cli.load(
        compose([
            *CASES[case], "scale=test", f"scale.gpus_per_node={world}", f"layout.machines={machines}",
            f"device={device.type}",
        ])
    )  # fmt: skip
    assert run.ranks_per_node == world // machines
    workload = cli.workload_class(run.benchmark.name)(run, Layout(run.layout, rank, device))
    step = workload.build_step()
    runner = StepRunner(step, workload.model, run.grad_accumulation_steps, run.cuda_graphs)
    examples = list(workload.example_batches())
    runner.warm_up(examples)
    trainable = {name: tensor for name, tensor in workload.model.named_parameters() if tensor.requires_grad}
    state = {name: tensor for updater in step.updaters for name, tensor in updater.named_state()}
    losses = []
    with runner.on_stream():
        step.materialize()
        before = {name: tensor.detach().clone() for name, tensor in (trainable | state).items()}
        for _ in range(STEPS):
            result = runner(examples[:1] * run.grad_accumulation_steps)
            losses.append(step.read(result.names, result.values.tolist()).metrics["loss"])
        step.materialize()
        changes = {
            name: (tensor.detach() - before[name]).double().cpu()
            for name, tensor in (trainable | state).items()
            if tensor.is_floating_point()
        }
    assert not runner.uncaptured
    runner.close()
    workload.close()
    size = sum(tensor.numel() * tensor.element_size() for tensor in trainable.values())
    return {"losses": losses, "changes": changes, "gradient_bytes": size}
