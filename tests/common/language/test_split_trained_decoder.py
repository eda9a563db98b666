"""A trained decoder that two and four gloo ranks share, under autograd and as halves, equals the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import split_trained_decoder_ranks as shared
import torch
from split_trained_decoder_ranks import BLOCKS, KINDS, LAYOUTS, run_rank
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.decoder import product_of
from common.language.products import Scratch, Shared, WeightCasts
from common.ops.linear.fp8 import GRADIENT, INPUT
from tests.common.language.small_trained_decoder import error
from tests.gloo_ranks import on_ranks

TOLERANCE = 1e-10
WORLD_OF = {name: world for world, layouts in LAYOUTS.items() for name in layouts}

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank has found, by the number of ranks."""
    return {world: on_ranks(run_rank, world, tmp_path_factory.mktemp("ranks")) for world in LAYOUTS}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of one rank under autograd, after two equal micro-batches."""
    network = shared.Network(TensorParallel(), ContextSplit(shared.S), "autograd", torch.float64)
    losses_BS = network.backward()
    network.backward()
    return {"losses": losses_BS, "evaluation": losses_BS, "gradients": network.own_gradients()}


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("name", WORLD_OF)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_losses_and_gradients_are_those_of_one_rank(ranks, expected, name, blocks):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"{name}/{blocks}"]
        for what in ("losses", "evaluation"):
            assert_equal(found[what], expected[what][:, found["columns"]])
        assert found["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            assert_equal(found["gradients"][parameter], gradient)


@pytest.fixture(scope="module")
def in_fp8() -> dict[str, Any]:
    """One rank's steps with products in FP8."""
    network = shared.Network(TensorParallel(), ContextSplit(shared.S), "handwritten", torch.bfloat16, "fp8")
    return shared.fp8_steps(network) | {"gradients": network.own_gradients()}


def test_fp8_of_two_ranks_is_as_good_as_that_of_one(ranks, expected, in_fp8):
    """Against float64; by their norms, since numbers of three significant bits are all off."""
    for rank in ranks[2]:
        for found, wanted in zip(rank["fp8"]["losses"], in_fp8["losses"], strict=True):
            assert float(found.mean()) == pytest.approx(float(wanted.mean()), rel=0.02)
        for name, gradient in expected["gradients"].items():
            bound = 1.3 * error(in_fp8["gradients"][name], gradient / 2)
            assert error(rank["fp8"]["gradients"][name], gradient / 2) < bound, name


def test_an_evaluation_of_two_ranks_in_fp8_is_what_their_next_step_computes(ranks, in_fp8):
    for rank in ranks[2]:
        found = rank["fp8"]
        assert torch.equal(found["evaluation"], found["next"])
        assert float(found["evaluation"].mean()) == pytest.approx(float(in_fp8["evaluation"].mean()), rel=0.02)


def test_ranks_cast_their_own_tokens_with_their_own_scales(ranks):
    own = {"qkv": INPUT, "gate_up": INPUT, "output": GRADIENT, "down": GRADIENT}
    first, second = (rank["fp8"]["scales"] for rank in ranks[2])
    roles = {name: own.get(name.split(".")[2]) for name in first}
    assert sum(role is not None for role in roles.values()) == len(own) * shared.ARCHITECTURE.layers
    for name, role in roles.items():
        if role is not None:
            assert first[name][role] > 0
            assert first[name][role] != second[name][role]


@pytest.mark.parametrize("linear", ["torch", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_two_ranks_are_those_of_their_operands(ranks, kind, linear):
    """In float64. Scales of FP8 differ by powers of two, so that bringing rows to one scale rounds nothing."""
    first, second = (rank["products"][f"{kind}/{linear}"] for rank in ranks[2])
    bound = 2**-7 if linear == "fp8" else 1e-12

    def joined(name: str, dim: int) -> Tensor:
        return torch.cat([first[name].double(), second[name].double()], dim)

    if linear == "fp8":
        assert first["inverse"] == 2 * second["inverse"]
    split = 0 if kind == "column" else 1  # of the weight
    x, dy, weight = joined("x", split), joined("dy", 1 - split), joined("weight", split)
    bias = joined("bias", 0) if kind == "column" else 0.0
    assert error(joined("y", 1 - split), x @ weight.t() + bias) < bound
    assert error(joined("dx", split), dy @ weight) < bound
    assert error(joined("dw", split), 2 * dy.t() @ x) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_zeros_alone_leaves_the_others_their_scales(ranks, kind):
    """Zeros have no scale: that of 1 with which they are cast would leave nothing of gradients of 1e-6."""
    first, second = (rank["zeros"][kind] for rank in ranks[2])
    own, all_of = ("x", "dy") if kind == "column" else ("dy", "x")
    half = shared.TOKENS // 2
    assert not second[own].any()
    for part, rank in enumerate((first, second)):
        rows = rank[all_of].double()[:half] if kind == "column" else first[own]
        wanted = rows.t() @ first[own] if kind == "column" else rows.t() @ rank[all_of].double()[:half]
        assert error(rank["dw"], 2 * wanted) < 2**-7, f"rank {part}"


def test_a_row_parallel_product_takes_no_bias():
    parallel = TensorParallel(2, 0, object())  # type: ignore[arg-type]
    layer = shared.RowParallelLinear(shared.INPUTS, shared.OUTPUTS, parallel, bias=True)
    assert product_of(layer, "torch", Shared(Scratch(shared.CPU), WeightCasts(), parallel)).bias is None


def test_layers_that_do_not_say_how_they_are_shared_are_refused():
    parallel = TensorParallel(2, 0, object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Linear"):
        product_of(torch.nn.Linear(2, 2), "torch", Shared(Scratch(shared.CPU), WeightCasts(), parallel))
