"""Masked-language-model accuracy over the whole evaluation set, against a plain loop over its sequences."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.bert.evaluate import MaskedLmAccuracy, TokenMeans
from common.contract.evaluation import Predictions, Weights
from common.distributed.layout import Layout
from tests.benchmarks.bert.small_shards import make_packs, make_samples, settings, write_data
from tests.gloo_ranks import on_ranks

LENGTHS = [(7 * number) % 29 + 4 for number in range(37)]  # one to four masked tokens each


class Guess(nn.Module):
    """Guesses a word from its neighbour on the left and its place; in training mode it is always wrong."""

    def __init__(self, factor=3.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.batches = 0
        self.with_gradients = False

    def forward(self, tensors):
        self.batches += 1
        place = tensors["masked_positions"].long()
        left = tensors["input_ids"][place - 1] + 10 * tensors["position_ids"][place]
        labels = tensors["masked_labels"]
        correct = (left * self.factor.long() + labels) % 5 < 2
        self.with_gradients |= torch.is_grad_enabled()
        losses = self.factor * (left % 7 + labels % 3).float()  # padding has a loss too, which must not count
        return SimpleNamespace(correct=correct & (not self.training), masked_lm_losses=losses)


def by_hand(samples, factor=3):
    """Right answers, masked tokens and loss, one masked token after another."""
    correct = masked = loss = 0
    for sample in samples:
        for position, word in zip(sample.positions, sample.words, strict=True):
            left = sample.tokens[position - 1] + 10 * position
            correct += (left * factor + word) % 5 < 2
            masked += 1
            loss += factor * (left % 7 + word % 3)
    return correct, masked, loss


@pytest.fixture(scope="module")
def samples():
    return make_samples(LENGTHS, seed=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory, samples) -> Path:
    return write_data(tmp_path_factory.mktemp("bert") / "data", make_packs([1, 2]), 1, samples)


def evaluation_of(root, model, layout=None, **changes):
    evaluation = MaskedLmAccuracy(model, settings(**changes), layout or Layout(), capture=True)
    evaluation.warm_up()
    evaluation.open_data(root)
    return evaluation


def weights_of(model):
    return Weights(dict(model.named_parameters()))


@pytest.mark.parametrize("eval_rows", [1, 2, 7, 100])
def test_accuracy_and_loss_are_those_of_a_plain_loop(root, samples, eval_rows):
    model = Guess()
    evaluation = evaluation_of(root, model, eval_rows=eval_rows)
    correct, masked, loss = by_hand(samples)
    values = evaluation.predict(weights_of(model)).values
    assert values == {"correct": correct, "masked": masked, "loss": loss, "sequences": 37, "expected": 37}
    assert evaluation.scorer.score(Predictions(values)) == {
        "masked_lm_accuracy": correct / masked, "masked_lm_loss": loss / masked, "eval_samples": 37
    }  # fmt: skip


def run_rank(rank, world, folder, root):
    """One of three ranks, whose parts have 12, 12 and 13 sequences."""
    model = Guess()
    evaluation = evaluation_of(root, model, Layout({"dp": world}, rank))
    return [evaluation.predict(weights_of(model)).values for _ in range(2)]


@pytest.mark.slow
def test_all_ranks_get_the_sums_over_all_ranks(root, samples, tmp_path):
    correct, masked, loss = by_hand(samples)
    expected = {"correct": correct, "masked": masked, "loss": loss, "sequences": 37, "expected": 37}
    assert on_ranks(partial(run_rank, root=root), 3, tmp_path) == [[expected, expected]] * 3


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_in_the_mode_that_it_had(root, training):
    model = Guess().train(training)
    evaluation = evaluation_of(root, model)
    assert model.training == training
    evaluation.predict(weights_of(model))
    assert model.training == training


def test_the_network_is_left_in_its_mode_when_it_fails(root, monkeypatch):
    model = Guess()
    evaluation = evaluation_of(root, model)

    def fail(tensors):
        raise ZeroDivisionError

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        evaluation.predict(weights_of(model))
    assert model.training


def test_evaluation_needs_no_gradients(root):
    model = Guess()
    evaluation_of(root, model).predict(weights_of(model))
    assert not model.with_gradients


def test_the_training_networks_weights_are_used_where_they_lie(root, samples):
    model = Guess(factor=3.0)
    evaluation = evaluation_of(root, model)
    weights = weights_of(model)
    evaluation.predict(weights)
    with torch.no_grad():
        model.factor.fill_(2.0)  # an update in place, between two evaluations
    assert evaluation.predict(weights).values["loss"] == by_hand(samples, factor=2)[2]
    assert model.factor.item() == 2.0


def test_other_weights_are_evaluated_and_leave_those_in_training_as_they_were(root, samples):
    other, in_training = Guess(factor=2.0), Guess(factor=3.0)
    values = evaluation_of(root, in_training).predict(weights_of(other)).values
    assert (values["correct"], values["masked"], values["loss"]) == by_hand(samples, factor=2)
    assert in_training.factor.item() == 3.0


def test_evaluations_read_nothing_once_the_data_are_open(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    model = Guess()
    evaluation = evaluation_of(copy, model)
    shutil.rmtree(copy)
    first = evaluation.predict(weights_of(model))
    assert evaluation.predict(weights_of(model)) == first


def test_warm_up_counts_nothing_and_needs_no_data(root, samples):
    model = Guess()
    evaluation = MaskedLmAccuracy(model, settings(), Layout(), capture=True)
    evaluation.warm_up()
    assert model.batches == 2
    evaluation.open_data(root)
    assert evaluation.predict(weights_of(model)).values["correct"] == by_hand(samples)[0]


def test_a_set_that_was_not_evaluated_wholly_gets_no_score():
    values = {"correct": 1, "masked": 2, "loss": 3.0, "sequences": 9_999, "expected": 10_000}
    with pytest.raises(RuntimeError, match="9999 of 10000 sequences were evaluated"):
        TokenMeans().score(Predictions(values))
