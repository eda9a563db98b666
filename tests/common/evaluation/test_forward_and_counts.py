"""The forward pass of an evaluation over static inputs, and numbers that are summed over its ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.contract.evaluation import Predictions, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, MeanScorer, check_whole_set
from common.evaluation.forward import ForwardPass
from tests.gloo_ranks import on_ranks


class Scale(nn.Module):
    """A factor; remembers whether it was called in evaluation mode and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.factor * x


def test_a_batch_is_copied_into_the_inputs_and_passed_through_the_given_weights():
    model = Scale()
    x = torch.zeros(3)
    forward = ForwardPass(model, lambda batch: model(batch["x"]), {"x": x}, capture=True)
    forward.warm_up()
    with forward.evaluating(Weights({"factor": torch.tensor(5.0)})):
        assert forward({"x": torch.tensor([1.0, 2.0, 3.0])}).tolist() == [5.0, 10.0, 15.0]
        assert x.tolist() == [1.0, 2.0, 3.0]
        x[0] = 4.0
        assert forward().tolist() == [20.0, 10.0, 15.0]
    assert model.factor.item() == 2.0


def test_warm_up_runs_the_network_as_an_evaluation_does():
    model = Scale()
    forward = ForwardPass(model, lambda batch: model(batch["x"]), {"x": torch.ones(1)}, capture=True)
    assert forward.warm_up().tolist() == [2.0]
    assert model.calls == [(False, False)] * 2
    assert model.training


def test_counts_are_whole_numbers_and_sums_are_not():
    counts = Counts(Layout(), ("right", "seen"), ("loss",))
    counts.add(torch.tensor(3), torch.tensor(4), torch.tensor(0.5, dtype=torch.float64))
    counts.add(torch.tensor(2), torch.tensor(4), torch.tensor(0.25, dtype=torch.float64))
    totals = counts.totals()
    assert totals == {"right": 5, "seen": 8, "loss": 0.75}
    assert [type(value) for value in totals.values()] == [int, int, float]


def test_each_count_up_to_the_tokens_of_a_large_set_is_exact():
    counts = Counts(Layout(), ("seen",))
    counts.add(torch.tensor(2**40))
    counts.add(torch.tensor(1))
    assert counts.totals() == {"seen": 2**40 + 1}


def test_an_evaluation_begins_with_zero_counts():
    counts = Counts(Layout(), ("seen",))
    counts.add(torch.tensor(7))
    counts.warm_up()
    assert counts.totals() == {"seen": 0}
    counts.add(torch.tensor(7))
    counts.clear()
    counts.add(torch.tensor(1))
    assert counts.totals() == {"seen": 1}


def run_rank(rank: int, world: int, folder: str) -> list[dict[str, float]]:
    """One of two ranks, which count 1 and 2."""
    counts = Counts(Layout({"dp": 2}, rank), ("seen",), ("loss",))
    found = []
    for _ in range(2):
        counts.clear()
        counts.add(torch.tensor(rank + 1), torch.tensor(rank + 0.5))
        found.append(counts.totals())
    return found


def run_split_rank(rank: int, world: int, folder: str) -> dict[str, dict[str, float]]:
    """One of four ranks, which count 1, 2, 4 and 8, in several layouts."""
    found = {}
    for name, sizes, axes in SPLIT:
        counts = Counts(Layout(sizes, rank), ("seen",), ("loss",), axes=axes)
        counts.warm_up()
        counts.add(torch.tensor(2**rank), torch.tensor(2**rank / 2))
        found[name] = counts.totals()
    return found


SPLIT = [
    ("replicas", {"dp": 2, "cp": 2}, ("dp",)),
    ("replicas and parts", {"dp": 2, "cp": 2}, ("dp", "cp")),
    ("parts", {"cp": 2, "tp": 2}, ("dp", "cp")),
    ("layers", {"tp": 4}, ("dp", "cp")),
]
SEEN = {"replicas": [5, 10, 5, 10], "replicas and parts": [15] * 4, "parts": [5, 10, 5, 10], "layers": [1, 2, 4, 8]}
"""Consecutive ranks differ in tp first, then in cp, then in dp."""


def test_parts_of_samples_are_summed_where_it_is_asked_for_and_the_ranks_of_a_layer_never(tmp_path):
    for rank, found in enumerate(on_ranks(run_split_rank, 4, tmp_path)):
        assert found == {name: {"seen": seen[rank], "loss": seen[rank] / 2} for name, seen in SEEN.items()}


def test_every_rank_gets_the_sums_over_all_ranks_once_an_evaluation(tmp_path):
    assert on_ranks(run_rank, 2, tmp_path) == [[{"seen": 3, "loss": 2.0}] * 2] * 2


@pytest.mark.parametrize("evaluated", [9, 11])
def test_a_set_of_which_a_sample_is_missing_or_counted_twice_has_no_score(evaluated):
    check_whole_set(10, 10, "pictures")
    with pytest.raises(RuntimeError, match=f"^{evaluated} of 10 pictures were evaluated$"):
        check_whole_set(evaluated, 10, "pictures")


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        (MeanScorer("accuracy", "right", "pictures"), 0.75),
        (MeanScorer("accuracy", "right", "pictures", each=3), 0.25),
        (MeanScorer("accuracy", "right", "pictures", "pixels", each=2), 0.3),
    ],
    ids=["of samples", "of values of samples", "of parts of samples"],
)
def test_a_mean_is_a_total_divided_by_a_count_of_the_whole_set(scorer, expected):
    values = {"right": 3.0, "pictures": 4, "pixels": 5}
    assert scorer.score(Predictions({**values, "expected": 4})) == {"accuracy": expected, "eval_samples": 4}
    with pytest.raises(RuntimeError, match=r"^4 of 5 pictures were evaluated$"):
        scorer.score(Predictions({**values, "expected": 5}))
