"""Evaluations of the pre-trainings in FP8 on a GPU: captured, eager, beside bf16; and what they leave of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpt3.workload import GptPretraining
from benchmarks.llama31_8b.workload import LlamaPretraining
from common import cli
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.step.graphs import StepRunner
from tests.benchmarks.evaluated_rows import Evaluated, Pretraining

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs FP8 units", allow_module_level=True)

GPU = torch.device("cuda")
TYPES: dict[str, type[GptPretraining] | type[LlamaPretraining]] = {
    "gpt3": GptPretraining,
    "llama31_8b": LlamaPretraining,
}
LENGTH, VOCABULARY, ROWS, STEPS, CLOSE = 384, 512, 6, 4, 0.005
SHARED = {"hidden": 512, "layers": 3, "heads": 4, "vocabulary": VOCABULARY, "initializer_range": 0.04}
FACTS: dict[str, dict[str, Any]] = {
    "gpt3": {**SHARED, "feed_forward": 2048, "positions": LENGTH},
    "llama31_8b": {
        **SHARED, "kv_heads": 2, "head_size": 128, "feed_forward": 1024, "row_length": LENGTH,
        "rope_original_context": 256,
    },
}  # fmt: skip


def built(workload_name: str, *overrides: str) -> Pretraining:
    facts = [f"benchmark.facts.{name}={value}" for name, value in FACTS[workload_name].items()]
    given = ["precision=bf16", "model.linear=fp8", "hparams.global_batch_size=4"]
    given += ["model.implementations.attention=reference", *overrides]
    run, _ = cli.load(compose([f"benchmark={workload_name}", "scale=test", "device=cuda", *facts, *given]))
    return TYPES[workload_name](run, Layout(run.layout, seed=3, device=GPU))


def rows(workload: Pretraining, count: int, seed: int) -> Tensor:
    """Noise; GPT-3's rows have a last token that nothing follows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator, dtype=torch.int32)
    if isinstance(workload, GptPretraining):
        tokens[:, -1] = -1
    return tokens


def state(workload: Pretraining) -> dict[str, Tensor]:
    tensors = [*workload.model.named_parameters(), *workload.model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def in_half_precision(workload_name: str, trained: Pretraining) -> float:
    """Return the score of the trained weights by products in bf16."""
    half = built(workload_name, "model.linear=torch")
    evaluated = Evaluated(half, rows(half, ROWS, 77))
    with torch.no_grad():
        for mine, other in zip(half.model.parameters(), trained.model.parameters(), strict=True):
            mine.copy_(other)
    score = evaluated.score()
    evaluated.close()
    return score


def train(workload: Pretraining, evaluates: bool) -> tuple[list[float], list[float]]:
    """Captured steps, and an evaluation behind each, which changes nothing of them; losses and scores."""
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps)
    runner.warm_up(workload.example_batches())
    # as a run does: building a step gives weights other addresses, and a graph keeps those that it was captured with
    evaluated = Evaluated(workload, rows(workload, ROWS, 77)) if evaluates else None
    losses, scores = [], []
    for number in range(STEPS):
        with runner.on_stream():
            micro_batches = [Batch({"tokens": rows(workload, 2, 2 * number + part).to(GPU)}, 2) for part in range(2)]
            result = runner(micro_batches)
            values = result.values.clone()
        torch.cuda.synchronize()
        losses.append(step.read(result.names, values.tolist()).metrics["loss"])
        if evaluated is not None:
            before = state(workload)
            scores.append(evaluated.score())
            for name, tensor in state(workload).items():
                assert torch.equal(tensor, before[name]), name
    assert not runner.uncaptured
    runner.close()
    if evaluated is not None:
        evaluated.close()
    return losses, scores


@pytest.mark.parametrize("workload_name", list(TYPES))
def test_evaluations_in_fp8_are_captured_and_leave_training_alone(workload_name: str) -> None:
    found = {}
    for name, given in {
        "captured": (), "eager": ("cuda_graphs=false",), "chunks": ("cuda_graphs=chunks",),
        "fp32": ("cuda_graphs=chunks", "optimizer.gradients=fp32"),
    }.items():  # fmt: skip
        workload = built(workload_name, *given)
        found[name] = train(workload, evaluates=True)
        if name == "captured":
            half = in_half_precision(workload_name, workload)
    alone, _ = train(built(workload_name), evaluates=False)
    for name, (losses, scores) in found.items():
        print(name, losses, scores)
        assert losses == pytest.approx(alone, rel=2e-3)
    of = {name: scores for name, (_, scores) in found.items()}
    for way in ("eager", "chunks"):
        assert of["captured"] == pytest.approx(of[way], rel=1e-3)
    assert of["captured"] == pytest.approx(of["fp32"], rel=CLOSE)  # weights that other gradients have moved
    assert of["captured"][-1] == pytest.approx(half, rel=CLOSE)
    assert of["captured"][-1] != half, "one of them was not in FP8"
    assert len(set(of["captured"])) == STEPS, "the graph has the weights of its warm-up"
