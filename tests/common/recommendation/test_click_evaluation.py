"""The evaluation of click models: every sample once, with the weights that are given, against scikit-learn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from common.contract.evaluation import Predictions, Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError, SuiteError
from common.recommendation.evaluation import AreaUnderCurve, ClickRanking

BATCH, SAMPLES, FEATURES = 8, 29, 3


def samples() -> tuple[Tensor, Tensor]:
    """Features and labels."""
    generator = torch.Generator().manual_seed(0)
    dense_SD = torch.randn((SAMPLES, FEATURES), generator=generator)
    return dense_SD, (torch.rand(SAMPLES, generator=generator) < 0.4).float()


class Source:
    """Batches of one size, the last one padded with samples that would spoil the result."""

    eval_samples = SAMPLES
    closed = False

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __iter__(self) -> Iterator[HostBatch]:
        dense_SD, label_S = samples()
        for number in range(len(self)):
            part = slice(number * BATCH, (number + 1) * BATCH)
            count = len(label_S[part])
            dense_BD = torch.full((BATCH, FEATURES), float("nan"))
            label_B = torch.full((BATCH,), 1.0)
            dense_BD[:count], label_B[:count] = dense_SD[part], label_S[part]
            tensors = {"dense": dense_BD, "label": label_B, "ids": torch.zeros(BATCH, 1, dtype=torch.int32)}
            yield HostBatch({**tensors, "count": torch.tensor(count)}, count, number)

    def close(self) -> None:
        self.closed = True


def evaluation(model: nn.Linear, source: Any, **options: Any) -> ClickRanking:
    def logits(tensors: Mapping[str, Tensor]) -> Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        found: Tensor = model(tensors["dense"])
        return found.squeeze(1)

    example = {
        "dense": torch.zeros(BATCH, FEATURES), "label": torch.ones(BATCH),
        "ids": torch.zeros(BATCH, 1, dtype=torch.int32), "count": torch.tensor(BATCH),
    }  # fmt: skip
    return ClickRanking(model, logits, example, lambda root: cast(Any, source), Layout(), capture=True, **options)


def test_forward_passes_that_were_worth_nothing_give_no_area():
    passes: list[str] = []

    @contextlib.contextmanager
    def checked() -> Iterator[None]:
        passes.append("begin")
        yield
        raise ConfigError("too few slots")

    evaluated = evaluation(model := nn.Linear(FEATURES, 1), Source(), checked=checked)
    evaluated.warm_up()
    evaluated.open_data(Path())
    assert passes == []
    with pytest.raises(ConfigError, match="too few slots"):
        evaluated.predict(Weights(dict(model.named_parameters())))
    assert passes == ["begin"]


def test_the_area_is_that_of_all_real_samples_with_the_given_weights():
    model, source = nn.Linear(FEATURES, 1), Source()
    other = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    evaluated = evaluation(model, source)
    evaluated.warm_up()
    evaluated.open_data(Path())
    dense_SD, label_S = samples()
    for weights in (before, other, before):
        predictions = evaluated.predict(Weights(weights))
        assert predictions is not None
        logit_S = (dense_SD @ weights["weight"].t() + weights["bias"]).squeeze(1)
        expected = roc_auc_score(label_S.numpy(), torch.sigmoid(logit_S).numpy())
        assert evaluated.scorer.score(predictions)["auc"] == pytest.approx(expected, abs=1e-14)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    evaluated.close()
    assert source.closed


def test_a_set_that_was_not_evaluated_wholly_has_no_score():
    counted = {"positives": 3, "negatives": 4, "doubled_wins": 12, "expected": 7}
    assert AreaUnderCurve().score(Predictions(counted))["auc"] == 0.5
    with pytest.raises(RuntimeError, match="7 of 8 samples were evaluated"):
        AreaUnderCurve().score(Predictions({**counted, "expected": 8}))


def test_a_prediction_that_is_no_number_ends_the_evaluation():
    model = nn.Linear(FEATURES, 1)
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    evaluated = evaluation(model, Source())
    evaluated.open_data(Path())
    with pytest.raises(SuiteError, match=f"{SAMPLES} of {SAMPLES} predictions are not numbers"):
        evaluated.predict(Weights(dict(model.named_parameters())))
