"""A network that two and four gloo ranks share equals the whole one, whatever of its vocabulary is padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_gpt3 import B, Passes, S, losses, network
from split_gpt3_ranks import BLOCKS, LAYOUTS, fp8_steps, run_rank, summed
from torch import Tensor

from common.language.network import EMBEDDING, Decoder
from tests.gloo_ranks import on_ranks

TOLERANCE = 1e-10
WORLD_OF = {name: world for world, layouts in LAYOUTS.items() for name in layouts}

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank has found, by the number of ranks."""
    return {world: on_ranks(run_rank, world, tmp_path_factory.mktemp("ranks")) for world in LAYOUTS}


def own_gradients(model: Decoder) -> dict[str, Tensor]:
    """Without padding."""
    words = model.architecture.vocabulary
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {EMBEDDING: found[EMBEDDING][:words]}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of one rank under autograd."""
    model = network()
    total = summed(Passes(model))
    (3.0 * total).backward()
    return {"losses": losses(model).detach(), "sum": total.detach(), "gradients": own_gradients(model)}


def assert_equal(found: Tensor, wanted: Tensor, what: str) -> None:
    bound = TOLERANCE * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", WORLD_OF)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_losses_and_gradients_are_those_of_one_rank(ranks, expected, name, blocks):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"{name}/{blocks}"]
        for what in ("losses", "sum"):
            assert_equal(found[what], expected[what], what)
        assert found["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            assert_equal(found["gradients"][parameter], gradient, parameter)


def test_deferred_gradients_of_a_sharded_head_equal_immediate_ones(ranks):
    for rank in ranks[2]:
        immediate, *deferred = rank["last stage"]
        for found in deferred:
            assert found.keys() == immediate.keys()
            for name, gradient in immediate.items():
                assert_equal(found[name], gradient, name)


def test_fp8_of_two_ranks_is_as_good_as_that_of_one(ranks, expected):
    """Against float64; by their norms, since numbers of three significant bits are all off."""
    alone = network(torch.bfloat16)
    means, factor = fp8_steps(alone), 1 / (3 * B * (S - 1))

    def error(found: Tensor, wanted: Tensor) -> float:
        return float((found.double() - wanted).norm() / wanted.norm())

    of_one = own_gradients(alone)
    for rank in ranks[2]:
        for found, wanted in zip(rank["fp8"]["losses"], means, strict=True):
            assert float(found) == pytest.approx(float(wanted), rel=0.02)
        for name, gradient in expected["gradients"].items():
            wanted = gradient * factor
            assert error(rank["fp8"]["gradients"][name], wanted) < 1.3 * error(of_one[name], wanted) + 0.01, name
