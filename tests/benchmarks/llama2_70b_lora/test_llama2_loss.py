"""The loss of rows with any number of scored tokens, and that of the whole network at its beginning."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.llama2_70b_lora.loss import means_of_rows, training_loss
from benchmarks.llama2_70b_lora.workload import LlamaLora
from common import cli
from common.config.composition import compose
from common.distributed.context_parallel.split import ContextSplit
from common.distributed.layout import Layout

LENGTH = 1024


def rows_of(*counts: int) -> tuple[Tensor, Tensor]:
    """Losses (T,) and labels of rows with so many scored tokens; tokens that are not scored have a loss as well."""
    generator = torch.Generator().manual_seed(4)
    losses_BS = torch.rand(len(counts), LENGTH, generator=generator, dtype=torch.float64) * 5
    labels_BS = torch.full((len(counts), LENGTH), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        scored = torch.randperm(LENGTH, generator=generator)[:count]
        labels_BS[row, scored] = torch.randint(0, 300, (count,), generator=generator, dtype=torch.int32)
    return losses_BS.flatten(), labels_BS


def by_hand(losses_T: Tensor, labels_BS: Tensor) -> list[float]:
    """The mean of every row that has one, token after token."""
    means = []
    for losses, labels in zip(losses_T.view(labels_BS.shape).tolist(), labels_BS.tolist(), strict=True):
        if scored := [loss for loss, label in zip(losses, labels, strict=True) if label != -1]:
            means.append(math.fsum(scored) / len(scored))
    return means


def test_rows_count_alike_however_many_of_their_tokens_are_scored():
    losses_T, labels_BS = rows_of(1, 10, 1000)
    part, whole = training_loss(losses_T, labels_BS, ContextSplit(labels_BS.shape[1]))
    expected = math.fsum(by_hand(losses_T, labels_BS)) / 3
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
    (mean,) = by_hand(losses_T, labels_BS)
    assert float(part.detach()) == pytest.approx(mean / 2, rel=1e-14)
    assert not losses_T.grad.view(labels_BS.shape)[0].any()
    assert bool(losses_T.grad.isfinite().all())


def test_an_evaluation_knows_which_rows_have_a_mean():
    losses_T, labels_BS = rows_of(1, 0, 10, 1000)
    means_B, scored_B = means_of_rows(losses_T, labels_BS, None)
    assert scored_B.tolist() == [True, False, True, True]
    assert means_B[scored_B].tolist() == pytest.approx(by_hand(losses_T, labels_BS), rel=1e-14)
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
    means = by_hand(losses_T, labels_BS)
    assert len(means) == 2
    assert float(made.total.detach()) == float(made.metrics["loss"]) == pytest.approx(math.fsum(means) / 2, rel=1e-12)
