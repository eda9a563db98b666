"""The mean over the rows of the evaluation set, on any number of replicas, against a plain loop over its rows."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.llama2_70b_lora.data import open_evaluation
from benchmarks.llama2_70b_lora.evaluate import RowMeans, mean_of_rows
from common.contract.evaluation import Predictions, Weights
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
