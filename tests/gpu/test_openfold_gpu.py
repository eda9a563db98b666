"""OpenFold on a GPU: graphs of whole steps and of micro-batches beside eager steps, and bf16 beside fp32."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.openfold.labels import labels_of
from benchmarks.openfold.losses import all_losses
from benchmarks.openfold.workload import OpenFold
from common.config import loading
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.step.graphs import StepRunner

pytestmark = pytest.mark.gpu

SIZES = [
    "benchmark.facts.crop_size=32", "benchmark.facts.msa_clusters=7", "benchmark.facts.extra_msa=16",
    "benchmark.facts.recycling_iters=3", "benchmark.facts.evoformer.pair=32", "benchmark.facts.evoformer.msa=64",
    "benchmark.facts.extra.pair=32", "benchmark.facts.structure.pair=32", "benchmark.facts.evoformer.pair_head=16",
    "benchmark.facts.evoformer.multiplication=32", "benchmark.facts.evoformer.msa_head=16",
]  # fmt: skip
LINEAR = ["hparams.epsilon=1", "hparams.base_learning_rate=1"]
"""Updates are proportional to the gradient's moments. With a small epsilon, Adam makes an update of rounding errors
where a gradient is nearly zero, such as that of a unit whose sum is zero before its ReLU."""


def built(precision: str, *overrides: str) -> OpenFold:
    options = ["benchmark=openfold", "scale=test", "device=cuda", "micro_batch=1", "hparams.global_batch_size=1"]
    settings = [*options, f"precision={precision}", "model.final_std=0.02", *SIZES, *overrides]
    run, _ = loading.load(compose(settings), lambda _: OpenFold)
    return OpenFold(run, Layout(device="cuda", seed=1))


def test_graphs_of_all_numbers_of_passes_have_the_results_of_eager_steps() -> None:
    weights = []
    for capture in (False, True):
        workload = built("fp32", *LINEAR)
        runner = StepRunner(workload.build_step(), workload.model, 1, capture)
        examples = list(workload.example_batches())
        runner.warm_up(examples)
        assert runner.cost.graphs == (4 if capture else 0)
        for step, number in enumerate((0, 3, 1, 2, 3, 0)):
            tensors = examples[3 - number].tensors | {"dropout_seed": torch.tensor(step, device="cuda")}
            runner([Batch(tensors, 1, examples[3 - number].key)])
        weights.append(copy.deepcopy(workload.model.state_dict()))
        runner.close()
    eager, captured = weights
    for name, tensor in eager.items():
        torch.testing.assert_close(captured[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_accumulated_steps_have_two_graphs_for_each_number_of_passes_and_equal_eager_steps(recompute: str) -> None:
    """Steps with other numbers of passes follow each other, because the graphs of all numbers share memory."""
    found = []
    for graphs in ("false", "chunks"):
        accumulated = ["hparams.global_batch_size=3", f"cuda_graphs={graphs}", f"model.recompute={recompute}"]
        workload = built("fp32", *LINEAR, *accumulated)
        cfg = workload.cfg
        runner = StepRunner(workload.build_step(), workload.model, cfg.grad_accumulation_steps, cfg.cuda_graphs)
        examples = {batch.key: batch.tensors for batch in workload.example_batches()}
        runner.warm_up(workload.example_batches())
        assert runner.cost.graphs == (8 if graphs == "chunks" else 0)
        results = []
        for step, passes in enumerate((4, 1, 3, 2, 4, 1)):
            seeds = [torch.tensor(3 * step + number, device="cuda") for number in range(3)]
            noise = [torch.full_like(examples[passes]["msa_feat"], 0.1 * number) for number in range(3)]
            given = [
                examples[passes] | {"dropout_seed": seed, "msa_feat": examples[passes]["msa_feat"] + shift}
                for seed, shift in zip(seeds, noise, strict=True)
            ]
            results.append(runner([Batch(tensors, 1, passes) for tensors in given]).values.clone())
        assert runner.uncaptured == {}
        found.append((torch.stack(results), copy.deepcopy(workload.model.state_dict())))
        runner.close()
    (eager_results, eager), (results, captured) = found
    torch.testing.assert_close(results, eager_results, rtol=1e-3, atol=1e-5)
    for name, tensor in eager.items():
        torch.testing.assert_close(captured[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_bf16_has_nearly_the_losses_of_fp32() -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        workload = built(precision)
        batch = next(iter(workload.example_batches()))
        tensors, model, facts = batch.tensors, workload.model, workload.own.facts
        labels = labels_of(tensors, model.tables)
        _, parts = all_losses(model(tensors), labels, tensors, facts.loss, facts.crop_size)
        losses.append({name: part.item() for name, part in parts.items()})
    assert losses[1] == {name: pytest.approx(value, rel=0.05) for name, value in losses[0].items()}
