"""A decoder that two and four gloo ranks share, under autograd and as halves, equals the whole one under autograd."""

from __future__ import annotations

from typing import Any

import pytest
import split_frozen_decoder_ranks as shared
import torch
import torch.nn.functional as F
from split_frozen_decoder_ranks import BLOCKS, LAYOUTS, run_rank
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.architecture import TokenPositions
from common.language.fp8_products import FROZEN_GRADIENT, FROZEN_INPUT
from common.language.network import Decoder
from tests.gloo_ranks import on_ranks

TOLERANCE = 1e-10
WORLD_OF = {name: world for world, layouts in LAYOUTS.items() for name in layouts}

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank has found, by the number of ranks."""
    return {world: on_ranks(run_rank, world, tmp_path_factory.mktemp("ranks")) for world in LAYOUTS}


def losses_of_logits(decoder: Decoder, hidden_TE: Tensor) -> Tensor:
    logits_TV = decoder.head(hidden_TE)
    labels_T = shared.micro_batch()[1].flatten()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=-1, reduction="none").view(shared.B, shared.S)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of one rank, under autograd, with PyTorch's cross-entropy of all logits."""
    tokens_BS, labels_BS, seed = shared.micro_batch()
    decoder = shared.build(TensorParallel(), torch.float64)
    positions = {given: TokenPositions.whole(shared.B, shared.S, given) for given in (seed, None)}
    hidden_TE = decoder.hidden_states(tokens_BS, positions[seed])
    losses_BS = losses_of_logits(decoder, hidden_TE)
    means = [losses_BS[row][labels_BS[row] != -1].mean() for row in range(shared.B)]
    torch.stack(means).mean().backward()
    return {
        "hidden": hidden_TE.detach().view(shared.B, shared.S, -1),
        "losses": losses_BS.detach(),
        "evaluation": losses_of_logits(decoder, decoder.hidden_states(tokens_BS, positions[None])).detach(),
        "gradients": {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad},
    }


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("name", WORLD_OF)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_hidden_states_losses_and_gradients_are_those_of_one_rank(ranks, expected, name, blocks):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"{name}/{blocks}"]
        for what in ("hidden", "losses", "evaluation"):
            assert_equal(found[what], expected[what][:, found["columns"]])
        assert found["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            assert_equal(found["gradients"][parameter], gradient)


def test_dropout_shows(expected):
    assert float((expected["losses"] - expected["evaluation"]).abs().max()) > 0.1


@pytest.fixture(scope="module")
def in_fp8() -> dict[str, Any]:
    """One rank's steps with products in FP8."""
    network = shared.Network(TensorParallel(), ContextSplit(shared.S), "frozen", fp8=True)
    return shared.fp8_steps(network) | {"gradients": network.own_gradients()}


def test_fp8_products_of_two_ranks_follow_those_of_one(ranks, in_fp8):
    for rank in ranks[2]:
        for step, (found, wanted) in enumerate(zip(rank["fp8"]["losses"], in_fp8["losses"], strict=True)):
            for row in range(shared.B):
                assert float(found[row].sum()) == pytest.approx(float(wanted[row].sum()), rel=0.04), f"step {step}"


def test_fp8_gradients_of_two_ranks_are_as_good_as_those_of_one(ranks, expected, in_fp8):
    """Against float64; by their norms, since numbers of three significant bits are all off."""
    for name, gradient in expected["gradients"].items():
        error = relative_error(in_fp8["gradients"][name], gradient)
        for rank in ranks[2]:
            assert relative_error(rank["fp8"]["gradients"][name], gradient) < 1.25 * error


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_ranks_cast_their_own_tokens_with_their_own_scales(ranks):
    """Which travel with the tokens: the test above would fail if one rank's were taken for all."""
    own = {"qkv": FROZEN_INPUT, "gate_up": FROZEN_INPUT, "output": FROZEN_GRADIENT, "down": FROZEN_GRADIENT}
    first, second = (rank["fp8"]["scales"] for rank in ranks[2])
    roles = {name: own[name.split(".")[2]] for name in first}
    assert len(roles) == len(own) * shared.ARCHITECTURE.layers
    for name, role in roles.items():
        assert first[name][role] > 0
        assert first[name][role] != second[name][role]
