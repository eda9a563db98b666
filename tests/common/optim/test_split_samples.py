"""Four gloo ranks that split two replicas' samples (dp 2 x cp 2) do what one does with whole samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_ranks import ITERATIONS, LANES, difference
from split_sample_ranks import MAX_NORM, RATES, SAMPLES, SHARDED, WIDTH, WORLD, Network, SplitTrainee, lanes, run_rank
from torch import Tensor

from common.distributed.layout import Layout
from tests.gloo_ranks import on_ranks, results

TOLERANCE = 1e-12  # of float64 sums in another order, relative to the norm


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder to which four ranks have written what they found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    SplitTrainee.save(Layout(seed=7), folder / "of_one")
    on_ranks(run_rank, WORLD, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    return results(WORLD, root)


def with_pytorch(clip: str | None = None) -> dict[str, Tensor]:
    """The weights that torch.optim's Nesterov SGD ends with on whole samples, clipped by torch.nn.utils."""
    model = Network().double()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01, nesterov=True)
    for iteration in range(ITERATIONS):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for lane in lanes(iteration):
            optimizer.zero_grad()
            model(lane).backward()
            if clip == "before":
                torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total / LANES
        if clip == "after":
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.param_groups[0]["lr"] = RATES[iteration]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    """Weights after training on whole samples: PyTorch's own SGD, and this suite's LAMB on one rank."""
    return {"nesterov": with_pytorch(), "lamb": SplitTrainee.train(Layout(seed=7), rule="lamb")}


@pytest.mark.parametrize("rule", ["nesterov", "lamb"])
@pytest.mark.parametrize("name", list(SHARDED))
def test_split_samples_train_as_whole_ones(ranks, expected, name, rule):
    for rank in ranks:
        assert difference(rank[f"train/{rule}/{name}"], expected[rule]) < TOLERANCE


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", list(SHARDED))
def test_split_samples_clip_as_whole_ones(ranks, expected, name, when):
    clipped = with_pytorch(when)
    assert difference(clipped, expected["nesterov"]) > 1e-3, "clipping must do something"
    for rank in ranks:
        assert difference(rank[f"clip/{when}/{name}"], clipped) < TOLERANCE


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["all", "node"])
def test_one_sample_over_all_ranks_clips_as_whole_ones(ranks, name, when):
    clipped = with_pytorch(when)
    for rank in ranks:
        assert difference(rank[f"one_sample/{when}/{name}"], clipped) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "sharing"), [("none", 1), ("all", WORLD), ("all_reduce", WORLD), ("before", WORLD), ("node", 2)]
)
def test_the_ranks_that_share_hold_equal_parts_and_update_every_weight_once(ranks, name, sharing):
    weights = sum(parameter.numel() for parameter in Network().parameters())
    found = [rank[f"held/{name}"] for rank in ranks]
    for one in found:
        assert set(one["state"].values()) == {one["buffer"] // sharing}
        assert any(kind.startswith("momentum") for kind in one["state"])
    for first in range(0, WORLD, sharing):
        assert sum(one["updated"] for one in found[first : first + sharing]) == weights


def test_the_log_says_over_how_many_ranks_gradients_are_scattered(ranks):
    assert ranks[0]["held/all"]["words"] == "scatter over 4 ranks during the backward pass"
    assert ranks[0]["held/before"]["words"] == "scatter over 2 ranks after the backward pass, as clipping comes before"


@pytest.mark.parametrize("name", [*SHARDED, "before"])
def test_ranks_end_with_the_same_bits(ranks, name):
    first, *others = (rank[f"half/{name}"] for rank in ranks)
    for other in others:
        assert all(torch.equal(other[weight], first[weight]) for weight in first)


@pytest.mark.parametrize("name", list(SHARDED))
def test_the_norm_counts_every_weight_once(ranks, name):
    model = Network().double()
    sum(model(lane) for lane in lanes(0)).backward()
    norm = math.sqrt(sum(float((p.grad / LANES).square().sum()) for p in model.parameters()))
    assert [rank[f"norm/{name}"] for rank in ranks] == [pytest.approx(norm, rel=1e-6)] * WORLD


def test_parts_of_a_gradient_are_not_sent_either_but_activations_are(ranks):
    activations = SAMPLES * WIDTH  # there and back, for each of two micro-batches
    for rank in ranks:
        *passes, result = rank["silenced"]
        assert passes == [activations] * 4
        assert result < WIDTH


@pytest.mark.parametrize("name", list(SHARDED))
def test_a_skipped_iteration_leaves_every_bit_on_every_rank(ranks, name):
    assert [rank[f"skip/{name}"] for rank in ranks] == [[]] * WORLD


@pytest.mark.parametrize("name", list(SHARDED))
def test_overflow_in_one_part_of_a_sample_leaves_every_bit_on_all_ranks(ranks, name):
    assert [rank[f"overflow/{name}"] for rank in ranks] == [{"changed": [], "overflow": True}] * WORLD


@pytest.mark.parametrize("name", ["none", "all", "all_reduce"])
@pytest.mark.parametrize("when", ["before_reduction", "after_reduction"])
def test_beside_split_layers_too_a_weight_counts_once(ranks, when, name):
    # sums over cp: 3 and 6 on the parts of tp 0 and 1, 7 where the tp ranks are redundant, and 7 where all are; over cp
    # and tp 10 where all four have parts
    norm = math.sqrt(100 * 3.0**2 + 100 * 6.0**2 + 10 * 7.0**2 + 5 * 7.0**2 + 3 * 10.0**2)
    for rank, cases in enumerate(ranks):
        moved = cases[f"model_parallel/{when}/{name}"]
        assert moved["own"] == pytest.approx([-3.0 * (1 + rank % 2) / norm] * 100)
        assert moved["shared"] == pytest.approx([-7.0 / norm] * 10)
        assert moved["redundant"] == pytest.approx([-7.0 / norm] * 5)
        assert moved["partial"] == pytest.approx([-10.0 / norm] * 3)


def test_only_the_first_rank_writes_model_and_optimizer(root):
    place = root / "checkpoints" / "step_00000002"
    contents = [torch.load(place / f"rank_{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert ["model" in content for content in contents] == [True, False, False, False]
    assert ["updaters" in content for content in contents] == [True, False, False, False]


def test_the_same_ranks_go_on_with_their_own_buffers(ranks, expected):
    for rank, cases in enumerate(ranks):
        assert difference(cases["resume/same"]["weights"], expected["lamb"]) < TOLERANCE
        assert cases["resume/same"]["seen"] == rank + 1.0
        assert cases["resume/same"]["remarks"] == []


def test_ranks_that_do_not_split_samples_may_go_on(ranks, expected):
    for cases in ranks:
        resumed = cases["resume/dp"]
        assert difference(resumed["weights"], expected["lamb"]) < TOLERANCE
        assert resumed["seen"] == 1.0
        (remark,) = resumed["remarks"]
        assert "of 2 replicas, this run has 4, and layout.cp=1 instead of 2" in remark


def test_a_node_with_a_part_of_a_samples_ranks_may_go_on(ranks, expected):
    for cases in ranks:
        assert difference(cases["resume/node"]["weights"], expected["lamb"]) < TOLERANCE


def test_four_ranks_go_on_with_what_one_has_saved(ranks, expected):
    for cases in ranks:
        assert difference(cases["resume/one"]["weights"], expected["lamb"]) < TOLERANCE


def test_one_rank_goes_on_with_what_four_have_saved(root, expected):
    resumed = SplitTrainee.resume(Layout(seed=7), root / "checkpoints" / "step_00000002")
    assert difference(resumed["weights"], expected["lamb"]) < TOLERANCE
