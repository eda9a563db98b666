"""Test that the optimizer, sharded over two and four gloo ranks, equals one rank with the same micro-batches."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_ranks import (
    CLIPS,
    RULES,
    SHARDED,
    TRITON_DTYPES,
    WIDTH,
    Trainee,
    difference,
    run_rank,
    run_triton_rank,
)
from torch import Tensor

from common.distributed.layout import Layout
from tests.gloo_ranks import on_ranks, results

TOLERANCE = 1e-12  # of float64 sums in another order, relative to the norm
WORLDS = (2, 4)
CASES = [(world, name) for world in WORLDS for name in SHARDED if world == 4 or not name.startswith("node")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of four ranks, then of two."""
    folder: Path = tmp_path_factory.mktemp("worlds")
    for world in reversed(WORLDS):  # two resume what four have saved
        on_ranks(run_rank, world, folder / str(world))
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the results of each rank by case, for each number of ranks."""
    return {world: results(world, root / str(world)) for world in WORLDS}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    """Return the final weights of one rank, by case."""
    layout = Layout(seed=7)
    weights = {f"train/{rule}": Trainee.train(layout, rule=rule) for rule in RULES}
    return weights | {f"clip/{when}": Trainee.train(layout, clip=clip) for when, clip in CLIPS.items()}


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("world", "name"), CASES)
def test_shards_train_as_one_rank_that_accumulates(found, alone, world, name, rule):
    for rank in found[world]:
        assert difference(rank[f"train/{rule}/{name}"], alone[f"train/{rule}"]) < TOLERANCE


@pytest.mark.parametrize("when", list(CLIPS))
@pytest.mark.parametrize(("world", "name"), CASES)
def test_shards_clip_as_one_rank_that_accumulates(found, alone, world, name, when):
    assert difference(alone[f"clip/{when}"], alone["train/lars"]) > 1e-3, "clipping must do something"
    for rank in found[world]:
        assert difference(rank[f"clip/{when}/{name}"], alone[f"clip/{when}"]) < TOLERANCE


@pytest.mark.parametrize(("world", "name"), [*CASES, (2, "before")])
def test_a_silenced_iteration_sends_single_numbers_and_no_tensor_of_the_model(found, world, name):
    for rank in found[world]:
        usual, silent = rank[f"silenced/{name}"]
        assert Counter(silent) <= Counter(usual)  # all that is not of gradients and weights remains
        assert len(silent) == (1 if name == "none" else 3)  # with shards norms and the overflow, and then the result
        assert silent.count(6) == usual.count(6) == 1  # the step's result
        large = [size for size in usual if size >= WIDTH * WIDTH]
        assert max(silent) < WIDTH * WIDTH
        if name in ("copied", "copied_late"):  # copies move all gradients and weights
            assert large == []
        else:
            assert len(large) >= 3


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_end_with_the_same_bits(found, world, name):
    first, *others = (rank[f"half/{name}"] for rank in found[world])
    for other in others:
        assert all(torch.equal(other[weight], first[weight]) for weight in first)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["all", "copied"])
def test_overlap_changes_no_bit(found, world, name):
    for rank in found[world]:
        late = rank[f"half/{name}_late"]
        assert all(torch.equal(weight, late[weight_name]) for weight_name, weight in rank[f"half/{name}"].items())


def test_copies_give_two_ranks_the_bits_of_collectives(found):
    for rank in found[2]:
        copied = rank["half/copied"]
        assert all(torch.equal(weight, copied[name]) for name, weight in rank["half/all"].items())


@pytest.mark.parametrize("world", WORLDS)
def test_without_blocks_the_weights_are_gathered_after_the_update(found, world):
    for rank in found[world]:
        assert all(torch.equal(w, rank["train/lars/all"][name]) for name, w in rank["no_blocks"].items())


@pytest.mark.parametrize("world", WORLDS)
def test_weights_lag_one_update_until_materialized(found, world):
    assert found[world][0]["stale"] == {"before": False, "after": True, "idempotent": True}


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_skipped_iteration_leaves_every_bit_on_every_rank(found, world, name):
    assert [rank[f"skip/{name}"] for rank in found[world]] == [[]] * world


@pytest.mark.parametrize(("world", "name"), [*CASES, (2, "before"), (4, "before"), (4, "copied_before")])
def test_overflow_on_one_rank_leaves_every_bit_on_all(found, world, name):
    expected = {"changed": [], "overflow": True, "trains again": True}
    assert [rank[f"overflow/{name}"] for rank in found[world]] == [expected] * world


@pytest.mark.parametrize(("world", "name"), CASES)
def test_the_norm_is_that_of_the_averaged_gradient_over_all_parameters(found, world, name):
    trainee = Trainee(Layout(seed=7))
    trainee.iterate(0)  # leaves the sum over four lanes in .grad
    groups = {"matrices": 1.0, "vectors": 0.5}  # grad_scale
    squares = [
        (p.grad / 4 * groups["matrices" if p.ndim > 1 else "vectors"]).square().sum()
        for p in trainee.model.parameters()
    ]
    expected = float(torch.stack(squares).sum().sqrt())
    assert [rank[f"norm/{name}"] for rank in found[world]] == [pytest.approx(expected, rel=1e-6)] * world


@pytest.mark.parametrize("name", ["none", "all", "all_reduce"])
def test_clipping_after_the_reduction_counts_a_replicated_weight_once(found, name):
    norm = math.sqrt(100 * 1.0**2 + 100 * 2.0**2 + 10 * 3.5**2)
    for rank, cases in enumerate(found[4]):
        moved = cases[f"after_reduction/{name}"]
        assert moved["own"] == pytest.approx([-(1.0 + rank % 2) / norm] * 100)
        assert moved["common"] == pytest.approx([-3.5 / norm] * 10)


@pytest.mark.parametrize("name", ["none", "all", "all_reduce"])
def test_clipping_before_the_reduction_counts_a_replicated_weight_once(found, name):
    first, second = (math.sqrt(100 * 1.0**2 + 100 * 2.0**2 + 10 * common**2) for common in (3.0, 4.0))
    for rank, cases in enumerate(found[4]):
        moved = cases[f"before_reduction/{name}"]
        assert moved["own"] == pytest.approx([-(1.0 + rank % 2) * (1 / first + 1 / second) / 2] * 100)
        assert moved["common"] == pytest.approx([-(3.0 / first + 4.0 / second) / 2] * 10)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    """Return the weights after three steps of LAMB on one rank."""
    return Trainee.train(Layout(seed=7), rule="lamb")


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_of_four_ranks_goes_on_with_as_many_and_with_two(found, uninterrupted, world):
    for rank in found[world]:
        assert difference(rank["resume"]["weights"], uninterrupted) < TOLERANCE


def test_a_checkpoint_of_four_ranks_goes_on_with_one(root, uninterrupted):
    resumed = Trainee.resume(Layout(seed=7), root / "4" / "checkpoints" / "step_00000002")
    assert difference(resumed["weights"], uninterrupted) < TOLERANCE


def test_as_many_ranks_get_their_own_buffers_back(found):
    assert [rank["resume"]["seen"].item() for rank in found[4]] == [1.0, 2.0, 3.0, 4.0]


def test_other_ranks_get_the_first_ones_buffers_and_random_states_of_their_own(found):
    resumed = [rank["resume"] for rank in found[2]]
    assert [rank["seen"].item() for rank in resumed] == [1.0, 1.0]
    assert resumed[0]["noise"] != resumed[1]["noise"]


def test_only_the_first_rank_writes_model_and_optimizer(root):
    folder = root / "4" / "checkpoints" / "step_00000002"
    contents = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(4)]
    assert ["model" in content for content in contents] == [True, False, False, False]
    assert ["updaters" in content for content in contents] == [True, False, False, False]
    shapes = {name: weight.shape for name, weight in contents[0]["model"].items() if name != "seen"}
    assert {name: t.shape for name, t in contents[0]["updaters"][0]["exp_avg"].items()} == shapes


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """Return the weights of two ranks that trained with interpreted Triton kernels."""
    return on_ranks(run_triton_rank, 2, tmp_path_factory.mktemp("triton"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
@pytest.mark.parametrize("rule", list(RULES))
def test_triton_on_shards_equals_plain_pytorch_on_one_rank(interpreted, rule, dtype):
    expected = Trainee.train(Layout(seed=7), 2, rule=rule, dtype=dtype, clip=CLIPS["after"], implementation="reference")
    for rank in interpreted:
        found = {name: weight.double() for name, weight in rank[f"{rule}/{dtype}"].items()}
        assert difference(found, {n: w.double() for n, w in expected.items()}) < (
            1e-5 if dtype == torch.float32 else 5e-3
        )
