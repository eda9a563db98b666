"""Test that GPT-3 trains with tensor and pipeline parallelism as on one GPU, eagerly and with both kinds of graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpt3.workload import GptPretraining
from common import cli
from common.config.composition import compose
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout
from common.step.graphs import StepRunner

pytestmark = pytest.mark.multigpu

LAYOUTS: dict[int, dict[str, tuple[dict[str, int], int]]] = {
    2: {"pp2": ({"pp": 2}, 1), "pp2 x 2": ({"pp": 2}, 2), "tp2": ({"tp": 2}, 1)},
    4: {
        "pp4 x 2": ({"pp": 4}, 2),
        "tp2 x pp2": ({"tp": 2, "pp": 2}, 1),
        "pp2 x 2, two replicas": ({"pp": 2, "dp": 2}, 2),
    },
}
"""Number of GPUs to cases: sizes of the axes, and chunks per stage."""

ROWS, OF_A_STEP, STEPS, WORDS = 2, 16, 3, 400
CLOSE = 1e-9
"""Largest difference of float64 weights. Gradients are summed in another order, some by atomic additions."""


class EvaluationRows(list[HostBatch]):
    """An evaluation set in memory."""

    eval_samples = 8

    def close(self) -> None:
        """Nothing is open."""


def tokens(seed: int, rows: int, length: int) -> Tensor:
    made = torch.randint(WORDS, (rows, length + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    made[:, -1] = -1
    return made


CUDA_GRAPHS = {"eager": "false", "captured": "true", "chunks": "chunks"}


def trained(layout: Layout, chunks: int, mode: str) -> tuple[GptPretraining, dict[str, Any]]:
    """Return the workload after some steps, the losses of the steps, and the log perplexity of some rows."""
    axes = [f"layout.{axis}={layout.size(axis)}" for axis in ("pp", "tp")]
    ranks, kind = f"scale.gpus_per_node={layout.world_size}", layout.device.type
    run, _ = cli.load(
        compose([
            "benchmark=gpt3", "scale=test", f"device={kind}", "precision=fp64", ranks, *axes, f"model.chunks={chunks}",
            "benchmark.facts.layers=8", "benchmark.facts.warmup_samples=0", f"hparams.global_batch_size={OF_A_STEP}",
            "optimizer.shard=all", "reader.eval_micro_batches=2", f"cuda_graphs={CUDA_GRAPHS[mode]}",
        ])
    )  # fmt: skip
    made = GptPretraining(run, layout)
    step, length = made.build_step(), made.own.facts.row_length
    runner = StepRunner(step, made.model, run.grad_accumulation_steps, run.cuda_graphs)
    runner.warm_up(made.example_batches())
    evaluation = made.evaluation(layout)
    losses = []
    replica, replicas = layout.coordinate("dp"), layout.size("dp")
    with runner.on_stream():
        evaluation.warm_up()
        for number in range(STEPS):
            parts = tokens(number, OF_A_STEP, length).split(ROWS)[replica::replicas]
            result = runner([Batch({"tokens": part.to(layout.device)}, ROWS) for part in parts])
            losses.append(step.read(result.names, result.values.tolist()).metrics["loss"])
        rows = tokens(99, 8, length).chunk(replicas)[replica].split(2 * ROWS)
        present = torch.ones(2 * ROWS, dtype=torch.bool)
        evaluation._open_source = lambda root: EvaluationRows(
            HostBatch({"tokens": part, "present": present}, 8, 0) for part in rows
        )
        evaluation.open_data(None)
        predictions = evaluation.predict(made.weights())
        assert predictions is not None
        found = {"losses": losses, "evaluated": evaluation.scorer.score(predictions)["log_perplexity"]}
    assert not runner.uncaptured
    evaluation.close()
    runner.close()
    return made, found


def own_of(whole: GptPretraining, part: GptPretraining, name: str) -> Tensor:
    """Return the shard of a weight of ``whole`` that the rank of ``part`` holds."""
    full, split = whole.model.get_parameter(name).detach(), part.tensor_splits().get(name)
    if split is None:
        return full
    return split.local_of(split.padded(full[: split.kept_shape[0]] if full.ndim > 1 and split.dim == 0 else full))


def compared(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    modes = tuple(CUDA_GRAPHS) if device.type == "cuda" else ("eager",)
    # The ranks come first: one GPU would launch all kernels, and a stage that loads one later must not hang.
    of_ranks = {
        f"{name}, {mode}": trained(Layout(axes, rank, device), chunks, mode)
        for name, (axes, chunks) in LAYOUTS[world].items()
        for mode in modes
    }
    whole, wanted = trained(Layout(device=device), 1, "eager")
    found: dict[str, Any] = {}
    for case, (own, measured) in of_ranks.items():
        weights = dict(own.model.named_parameters())
        found[case] = {
            "weights": max((weights[n] - own_of(whole, own, n)).abs().max().item() for n in weights),
            "losses": max(abs(a - b) for a, b in zip(measured["losses"], wanted["losses"], strict=True)),
            "evaluated": abs(measured["evaluated"] - wanted["evaluated"]),
        }
    return found


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    return compared(rank, world, device)


@pytest.mark.parametrize("mode", list(CUDA_GRAPHS))
def test_ranks_do_as_one_gpu(ranks, mode):
    for name in LAYOUTS[len(ranks)]:
        for found in ranks:
            differences = found[f"{name}, {mode}"]
            assert differences["weights"] < CLOSE, (name, differences)
            assert differences["evaluated"] < CLOSE, (name, differences)
            assert differences["losses"] < 5e-6, (name, differences)  # read in float32
