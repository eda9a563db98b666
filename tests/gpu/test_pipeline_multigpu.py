"""Test that pipeline stages train and evaluate as one GPU: eagerly, as one graph, and as graphs of chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.distributed.layout import Layout
from common.step.chunk_graphs import ChunkGraphs
from common.step.graphs import StepRunner
from tests.common.distributed.pipeline.staged_ranks import (
    LAYOUTS,
    STEPS,
    Trainee,
    batches,
)

pytestmark = pytest.mark.multigpu

CLOSE = 1e-9
"""Largest difference of float64 weights. Gradients are summed in another order, some by atomic additions."""


MODES = ("eager", "captured", "chunks")


def trained(layout: Layout, chunks: int, mode: str) -> dict[str, Any]:
    """Return weights, losses and score after some steps."""
    trainee = Trainee(layout, chunks, graphs=ChunkGraphs() if mode == "chunks" else None)
    first = batches(0, layout)
    runner = StepRunner(trainee.step, trainee.model, len(first), mode != "eager")
    runner.warm_up(first[:1])
    losses = []
    with runner.on_stream():
        for step in range(STEPS):
            result = runner(batches(step, layout))
            losses.append(trainee.step.read(result.names, result.values.tolist()).metrics["loss"])
        found = {"weights": trainee.weights(), "losses": losses, "evaluated": trainee.evaluate(6)}
    torch.cuda.synchronize()
    assert not runner.uncaptured
    runner.close()
    return found


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    # The stages come first: one GPU would launch all kernels, and a stage that loads one later must not hang.
    of_stages = {
        f"{name}, {mode}": trained(Layout(axes, rank, device), chunks, mode)
        for name, (axes, chunks) in LAYOUTS[world].items()
        for mode in MODES
    }
    wanted = trained(Layout(device=device), 1, "eager")
    found: dict[str, Any] = {}
    for case, own in of_stages.items():
        differences = [(own["weights"][n] - wanted["weights"][n]).abs().max().item() for n in own["weights"]]
        found[case] = {
            "weights": max(differences),
            "losses": max(abs(a - b) for a, b in zip(own["losses"], wanted["losses"], strict=True)),
            "evaluated": abs(own["evaluated"] - wanted["evaluated"]),
        }
    return found


@pytest.mark.parametrize("mode", MODES)
def test_stages_do_as_one_gpu(ranks, mode):
    for name in LAYOUTS[len(ranks)]:
        for found in ranks:
            differences = found[f"{name}, {mode}"]
            assert differences["weights"] < CLOSE, (name, differences)
            assert differences["evaluated"] < CLOSE, (name, differences)
            assert differences["losses"] < 1e-6, (name, differences)  # read in float32
