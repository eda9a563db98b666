"""Test evaluations of the pre-trainings in FP8: scores close to bf16, and no influence on training."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.gpt3.workload import GptPretraining
from benchmarks.llama31_8b.workload import LlamaPretraining
from common import cli
from common.config.composition import compose
from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.rank_info import RoleName
from common.errors import UnsupportedImplementation
from tests.benchmarks.evaluated_rows import Evaluated, Pretraining

TYPES: dict[str, type[GptPretraining] | type[LlamaPretraining]] = {
    "gpt3": GptPretraining,
    "llama31_8b": LlamaPretraining,
}
RATES = {"gpt3": 0.005, "llama31_8b": 0.02}
ROWS, STEPS, CLOSE = 4, 8, 0.005


def built(benchmark: str, *overrides: str, role: RoleName = "train") -> Pretraining:
    """Return the ``test`` recipe in FP8 with two micro-batches per step, on one rank."""
    rate = f"hparams.base_learning_rate={RATES[benchmark]}"
    given = [rate, "precision=bf16", "model.linear=fp8", "hparams.global_batch_size=4", "model.layers=2", *overrides]
    run, _ = cli.load(compose([f"benchmark={benchmark}", "scale=test", "device=cpu", *given]))
    return TYPES[benchmark](run, Layout(run.layout, seed=3, role=role))


def text(workload: Pretraining, rows: int, seed: int) -> Tensor:
    """Return rows that repeat a few words in a fixed order, with errors, so they can be learnt partly."""
    generator = torch.Generator().manual_seed(seed)
    length = workload.row_facts.row_length + 1
    starts = torch.randint(16, (rows, 1), generator=generator)
    tokens = (starts + torch.arange(length)) % 16 * 7
    errors = torch.rand(rows, length, generator=generator) < 0.1
    tokens = torch.where(errors, torch.randint(120, (rows, length), generator=generator), tokens).to(torch.int32)
    if isinstance(workload, GptPretraining):
        tokens = tokens[:, :length]
        tokens[:, -1] = -1
    return tokens


def evaluated(workload: Pretraining) -> Evaluated:
    """Return an evaluation of two batches."""
    return Evaluated(workload, text(workload, ROWS, 77))


def train(workload: Pretraining, beside: Evaluated | None = None) -> list[float]:
    """Train, with an evaluation after every other step; return the scores."""
    step, scores = workload.build_step(), []
    for number in range(STEPS):
        step([Batch({"tokens": text(workload, 2, 2 * number + part)}, 2) for part in range(2)])
        if beside is not None and number % 2:
            scores.append(beside.score())
    return scores


class Trained(NamedTuple):
    """A workload that was evaluated during its training, and its scores."""

    workload: Pretraining
    scores: list[float]


@pytest.fixture(scope="module", params=list(TYPES))
def trained(request: pytest.FixtureRequest) -> Trained:
    workload = built(request.param)
    scores = train(workload, evaluated(workload))
    assert scores[-1] < 0.9 * scores[0], "nothing was learnt"
    return Trained(workload, scores)


def again(trained: Trained, *overrides: str, role: RoleName = "train") -> Pretraining:
    return built(trained.workload.cfg.benchmark.name, *overrides, role=role)


def test_evaluations_in_fp8_do_not_change_training(trained):
    others = again(trained)
    train(others)
    model = trained.workload.model
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in [*others.model.named_parameters(), *others.model.named_buffers()]:
        assert torch.equal(own[name], tensor), name


def test_the_score_in_fp8_is_close_to_that_in_half_precision(trained):
    half = again(trained, "model.linear=torch")
    expected = evaluated(half).score(trained.workload.weights())
    assert trained.scores[-1] != expected, "one of them was not in FP8"
    assert trained.scores[-1] == pytest.approx(expected, rel=CLOSE)


def test_evaluation_ranks_compute_their_own_scales(trained):
    weights = Weights({name: tensor.detach().clone() for name, tensor in trained.workload.weights().tensors.items()})
    apart = evaluated(again(trained, role="evaluate"))
    found = apart.score(weights)
    expected = evaluated(again(trained, "model.linear=torch", role="evaluate")).score(weights)
    assert found != expected
    assert found == pytest.approx(expected, rel=CLOSE)
    apart.score(Weights({name: 2.0 * tensor for name, tensor in weights.tensors.items()}))
    assert apart.score(weights) == found, "nothing is left of other weights"


def test_the_score_of_a_checkpoint_does_not_depend_on_the_rank(trained):
    """A rank has scales of its last weights after training, and none if it only reads a checkpoint."""
    weights = Weights({name: tensor.detach().clone() for name, tensor in trained.workload.weights().tensors.items()})
    offline = "evaluation.scoring=offline"
    scores = [evaluated(again(trained, offline, role=role)).score(weights) for role in ("train", "evaluate")]
    after_training = again(trained, offline)
    train(after_training)
    scores.append(evaluated(after_training).score(weights))
    assert scores == [scores[0]] * 3


def test_rows_that_fp8_cannot_multiply_are_an_error_in_evaluation():
    odd = ("benchmark.facts.row_length=24", "micro_batch=2", "reader.eval_rows=1")
    with pytest.raises(UnsupportedImplementation, match=r"model\.linear=fp8: a product of 24 tokens"):
        built("llama31_8b", *odd)
