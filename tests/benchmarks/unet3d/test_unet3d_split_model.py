"""Test that 3D U-Net split over 2, 4 and 8 gloo ranks equals the network on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from unet3d_split_ranks import Trainee, run_rank

from common.distributed.layout import Layout
from tests.gloo_ranks import on_ranks

WORLDS = [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
"""Two of four slabs are inner ones."""
TOLERANCE = 1e-10
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return the results of all ranks, in the order of the slabs."""
    return on_ranks(run_rank, request.param, tmp_path_factory.mktemp("volumes"))


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """Return logits and gradients of one rank."""
    return Trainee(Layout()).gradients(of_image=True)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    """Return the weights after training on one rank."""
    return Trainee(Layout()).train()


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    off = float((found - expected).norm() / expected.norm())
    assert off < TOLERANCE, f"{what} differs by {off}"


def reduced(ranks: Ranks, run: str, name: str) -> Tensor:
    """Return the optimizer's gradient: the average of redundant gradients, the sum of others."""
    total = sum(rank[run][name] for rank in ranks)
    return total / len(ranks) if name in ranks[0]["redundant"] else total


@pytest.mark.parametrize("run", ["gradients", "with image"])
def test_logits_and_loss_equal_the_whole(ranks, whole, run):
    assert_equal(torch.cat([rank[run]["logits"] for rank in ranks], dim=2), whole["logits"], "logits")
    for rank in ranks:
        assert_equal(rank[run]["loss"], whole["loss"], "loss")


@pytest.mark.parametrize("run", ["gradients", "with image"])
def test_reduced_gradients_equal_the_whole(ranks, whole, run):
    for name in whole.keys() - {"loss", "logits", "image"}:
        assert_equal(reduced(ranks, run, name), whole[name], name)


def test_slabs_of_the_gradient_of_the_image_equal_the_whole(ranks, whole):
    assert_equal(torch.cat([rank["with image"]["image"] for rank in ranks], dim=2), whole["image"], "image")


def test_every_rank_has_the_whole_gradient_of_redundant_layers(ranks, whole):
    for rank in ranks:
        for name in rank["redundant"]:
            assert_equal(rank["gradients"][name], whole[name], name)


def test_trained_weights_equal_the_whole(ranks, trained):
    for name, expected in trained.items():
        for rank in ranks:
            assert_equal(rank["weights"][name], expected, name)


def test_small_levels_are_redundant_and_large_levels_split(ranks):
    blocks = {name.split(".")[0] for name in ranks[0]["redundant"]}
    assert blocks == {"down2", "down3", "bottleneck", "up0", "up1"}


def test_the_chosen_exchange_is_named(ranks):
    assert ranks[0]["chosen"]["halo"] == "p2p"
