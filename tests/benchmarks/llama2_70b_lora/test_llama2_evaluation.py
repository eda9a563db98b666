"""The mean over the rows of the evaluation set, on any number of replicas, against a plain loop over its rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.llama2_70b_lora.data import open_evaluation
from benchmarks.llama2_70b_lora.evaluate import RowMeans, mean_of_rows, means_of_rows, training_loss
from benchmarks.llama2_70b_lora.workload import LlamaLora
from common import cli
from common.config.composition import compose
from common.contract.evaluation import Predictions, Weights
from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from tests.benchmarks.llama2_70b_lora.small_rows import LENGTH, Facts, write_prepared

ROWS, UNSCORED = 173, 7


class Guess(nn.Module):
    """Has a loss for every token, also for those that must not count; in training mode it is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def losses(self, tensors: dict[str, Tensor]) -> Tensor:
        assert not torch.is_grad_enabled()
        values_BS = self.factor * (1 + (tensors["tokens"] * 7 + tensors["labels"] * 5) % 13)
        return (values_BS * math.nan if self.training else values_BS).flatten()


def by_hand(root: Path) -> list[float]:
    """The mean of every row with a scored token, from the files."""
    means = []
    tokens, scored = np.load(root / "eval_tokens.npy"), np.load(root / "eval_scored.npy")
    for ids, marks in zip(tokens.tolist(), scored.tolist(), strict=True):
        losses = [0.5 * (1 + (ids[i] * 7 + ids[i + 1] * 5) % 13) for i in range(LENGTH - 1) if marks[i + 1]]
        if losses:
            means.append(math.fsum(losses) / len(losses))
    return means


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """173 rows, one of them without a scored token and one with a single one."""
    folder = write_prepared(tmp_path_factory.mktemp("llama") / "data", 8, ROWS)
    scored = np.load(folder / "eval_scored.npy")
    scored[UNSCORED] = 0
    scored[UNSCORED + 1] = 0
    scored[UNSCORED + 1, 20] = 1
    np.save(folder / "eval_scored.npy", scored)
    return folder


def evaluation_of(root: Path, layout: Layout, rows: int) -> tuple[CountedEvaluation, Weights]:
    model = Guess()
    shape = (rows, LENGTH)
    example = {name: torch.zeros(shape, dtype=torch.int32) for name in ("tokens", "labels")}
    example["present"] = torch.ones(rows, dtype=torch.bool)
    opened = functools.partial(open_evaluation, facts=Facts(), layout=layout, rows_per_batch=rows)
    evaluation = mean_of_rows(model, model.losses, example, layout, opened, capture=True)
    evaluation.warm_up()
    evaluation.open_data(root)
    return evaluation, Weights(dict(model.named_parameters()))


@pytest.mark.parametrize("rows", [1, 16, 173, 200])
def test_the_score_is_the_plain_mean_over_the_rows_that_have_a_mean(root, rows):
    evaluation, weights = evaluation_of(root, Layout(), rows)
    for _ in range(2):
        score = evaluation.scorer.score(evaluation.predict(weights))
        means = by_hand(root)
        assert len(means) == ROWS - 1
        assert score == {"eval_loss": pytest.approx(math.fsum(means) / (ROWS - 1), rel=1e-13), "eval_samples": ROWS}


@pytest.mark.parametrize("replicas", [2, 4, 8, 200])
def test_the_parts_of_all_replicas_add_up_to_the_whole_set(root, replicas, monkeypatch):
    monkeypatch.setattr(Layout, "group", lambda self, *axes: None)  # no sum: each rank's own counts
    totals = {"rows": 0, "scored_rows": 0, "loss": 0.0}
    for rank in range(replicas):
        evaluation, weights = evaluation_of(root, Layout({"dp": replicas}, rank), 16)
        values = evaluation.predict(weights).values
        assert values["expected"] == ROWS
        totals = {name: total + values[name] for name, total in totals.items()}
    means = by_hand(root)
    assert totals == {"rows": ROWS, "scored_rows": ROWS - 1, "loss": pytest.approx(math.fsum(means), rel=1e-13)}


def test_a_set_that_was_not_evaluated_wholly_gets_no_score():
    values = {"rows": 172, "scored_rows": 172, "loss": 200.0, "expected": 173}
    with pytest.raises(RuntimeError, match="172 of 173 rows were evaluated"):
        RowMeans().score(Predictions(values))


TOKENS = 1024


def rows_of(*counts: int) -> tuple[Tensor, Tensor]:
    """Losses (T,) and labels of rows with so many scored tokens; tokens that are not scored have a loss as well."""
    generator = torch.Generator().manual_seed(4)
    losses_BS = torch.rand(len(counts), TOKENS, generator=generator, dtype=torch.float64) * 5
    labels_BS = torch.full((len(counts), TOKENS), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        scored = torch.randperm(TOKENS, generator=generator)[:count]
        labels_BS[row, scored] = torch.randint(0, 300, (count,), generator=generator, dtype=torch.int32)
    return losses_BS.flatten(), labels_BS


def means_by_hand(losses_T: Tensor, labels_BS: Tensor) -> list[float]:
    """The mean of every row that has one, token after token."""
    means = []
    for losses, labels in zip(losses_T.view(labels_BS.shape).tolist(), labels_BS.tolist(), strict=True):
        if scored := [loss for loss, label in zip(losses, labels, strict=True) if label != -1]:
            means.append(math.fsum(scored) / len(scored))
    return means


def test_rows_count_alike_however_many_of_their_tokens_are_scored():
    losses_T, labels_BS = rows_of(1, 10, 1000)
    part, whole = training_loss(losses_T, labels_BS, ContextSplit(labels_BS.shape[1]))
    expected = math.fsum(means_by_hand(losses_T, labels_BS)) / 3
    assert float(part.detach()) == float(whole) == pytest.approx(expected, rel=1e-14)
    of_tokens = float(losses_T[labels_BS.flatten() != -1].mean())
    assert float(part) != pytest.approx(of_tokens, rel=1e-3)


def test_the_gradient_of_a_token_is_one_over_the_scored_tokens_of_its_row_and_over_the_rows():
    losses_T, labels_BS = rows_of(1, 10, 1000)
    part, whole = training_loss(losses_T.requires_grad_(), labels_BS, ContextSplit(labels_BS.shape[1]))
    part.backward()
    assert not whole.requires_grad
    counts_B1 = torch.tensor([[1.0], [10.0], [1000.0]], dtype=torch.float64)
    expected = torch.where(labels_BS == -1, 0.0, 1 / (3 * counts_B1))
    assert torch.allclose(losses_T.grad.view(labels_BS.shape), expected, rtol=1e-14, atol=0)


def test_a_row_without_any_scored_token_has_no_loss_and_no_gradient():
    losses_T, labels_BS = rows_of(0, 10)
    part, _ = training_loss(losses_T.requires_grad_(), labels_BS, ContextSplit(labels_BS.shape[1]))
    part.backward()
    (mean,) = means_by_hand(losses_T, labels_BS)
    assert float(part.detach()) == pytest.approx(mean / 2, rel=1e-14)
    assert not losses_T.grad.view(labels_BS.shape)[0].any()
    assert bool(losses_T.grad.isfinite().all())


def test_an_evaluation_knows_which_rows_have_a_mean():
    losses_T, labels_BS = rows_of(1, 0, 10, 1000)
    means_B, scored_B = means_of_rows(losses_T, labels_BS, None)
    assert scored_B.tolist() == [True, False, True, True]
    assert means_B[scored_B].tolist() == pytest.approx(means_by_hand(losses_T, labels_BS), rel=1e-14)
    assert means_B[1] == 0


def built(*overrides: str) -> LlamaLora:
    run, _ = cli.load(compose(["benchmark=llama2_70b_lora", "scale=test", "device=cpu", *overrides]))
    return LlamaLora(run, Layout(run.layout, seed=3))


def test_random_weights_begin_at_the_loss_of_guessing_with_random_logits():
    # Behind the last norm E features have a mean square of 1, so that logits have a variance of E * 0.02 ** 2, and the
    # mean of log(sum(exp(logits))) is ln(V) plus half of it.
    hidden, vocabulary = 1024, 384
    facts = {"hidden": hidden, "layers": 1, "feed_forward": 16}
    workload = built(*(f"benchmark.facts.{name}={value}" for name, value in facts.items()), "micro_batch=32",
                     "hparams.global_batch_size=32")  # fmt: skip
    loss = float(workload.loss(next(iter(workload.example_batches()))).total.detach())
    assert loss == pytest.approx(math.log(vocabulary) + hidden * 0.02**2 / 2, abs=0.05)


@pytest.mark.parametrize("blocks", ["frozen", "autograd"])
def test_the_networks_loss_is_that_of_its_logits(blocks):
    workload = built(f"model.blocks={blocks}", "precision=fp64", "benchmark.facts.lora_dropout=0.0")
    with torch.no_grad():
        for name, parameter in workload.model.named_parameters():
            if name.endswith(".lora_b"):  # zero at the beginning
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    batch = next(iter(workload.example_batches()))
    labels_BS = batch.tensors["labels"].clone()
    labels_BS[0, 3:] = -1
    made = workload.loss(dataclasses.replace(batch, tensors={**batch.tensors, "labels": labels_BS}))
    logits_BSV = workload.model.forward_logits(batch.tensors["tokens"])
    losses_T = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten().long(), ignore_index=-1, reduction="none")
    means = means_by_hand(losses_T, labels_BS)
    assert len(means) == 2
    assert float(made.total.detach()) == float(made.metrics["loss"]) == pytest.approx(math.fsum(means) / 2, rel=1e-12)
