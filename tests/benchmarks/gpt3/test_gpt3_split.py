"""A network that two and four gloo ranks share equals the whole one, whatever of its vocabulary is padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from small_gpt3 import losses, network
from split_gpt3_ranks import LAYOUTS, run_rank
from torch import Tensor

TOLERANCE = 1e-10
WORLD_OF = {name: world for world, layouts in LAYOUTS.items() for name in layouts}

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank has found, by the number of ranks."""
    found = {}
    for world in LAYOUTS:
        folder: Path = tmp_path_factory.mktemp("ranks")
        mp.start_processes(run_rank, args=(world, str(folder)), nprocs=world, start_method="forkserver")
        found[world] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of one rank under autograd."""
    model = network()
    found = losses(model)
    (found.sum() + found[0]).backward()
    words = model.architecture.vocabulary
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients["embedding.weight"] = gradients["embedding.weight"][:words]
    return {"losses": found.detach(), "gradients": gradients}


def assert_equal(found: Tensor, wanted: Tensor, what: str) -> None:
    bound = TOLERANCE * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", WORLD_OF)
def test_losses_and_gradients_are_those_of_one_rank(ranks, expected, name):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"{name}/autograd"]
        assert_equal(found["losses"], expected["losses"], "losses")
        assert found["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            assert_equal(found["gradients"][parameter], gradient, parameter)
