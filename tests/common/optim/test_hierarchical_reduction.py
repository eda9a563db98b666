"""Four ranks as two nodes of two: shards of a node train bit for bit as a plain all-reduce, and send fewer bytes.

Gradients are small integers, whose float32 sums are exact in every order.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.train_step import apply_gradients
from tests.counted_messages import Sent, counted
from tests.gloo_ranks import on_ranks
from tests.shared_peers import shared_peers

RANKS, NODE, STEPS = 4, 2, 3
SIZES = {"first": 2048, "second": 1024, "third": 1024}
BYTES = 4 * sum(SIZES.values())
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"shard": "all"},
    "node": {"shard": "node", "ranks_per_node": NODE},
    "node, copies": {"shard": "node", "ranks_per_node": NODE, "exchange": "copy_engines"},
    "node, all_reduce": {"shard": "node", "ranks_per_node": NODE, "reduction": "all_reduce"},
}


def estimate(mode: str, rank: int) -> Sent:
    """Return the bytes of all steps by the formulas for rings: 2 (n - 1) / n of a sum, (n - 1) / n of a gather.

    In a ring over all ranks, the last rank of each node sends to the other node.
    """
    ring, half = STEPS * BYTES * 3 // 2, STEPS * BYTES // 2
    over_all = Sent(0, ring) if rank % NODE == NODE - 1 else Sent(ring, 0)
    if mode == "node":  # scatter in the node, sum of the halves over nodes, gather in the node
        return Sent(2 * half, half)
    if mode == "node, copies":
        return Sent(0, half)
    if mode == "node, all_reduce":
        return Sent(over_all.inside + half, over_all.between)
    return over_all


def train(layout: Layout, options: dict[str, Any]) -> tuple[dict[str, Tensor], Sent]:
    """Return the weights after some steps, and the bytes that the steps have sent."""
    named = {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    optimizer = Optimizer(
        [ParameterGroup(named)], SGD(0.5), constant(0.25), layout, grad_divisor=float(RANKS), bucket_bytes=BYTES // 4,
        **options,
    )  # fmt: skip
    with counted(layout.rank, NODE) as sent:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(RANKS * step + layout.rank)
            optimizer.begin()
            for parameter in named.values():
                assert parameter.grad is not None
                parameter.grad.copy_(torch.randint(-8, 9, parameter.shape, generator=generator))
            assert not apply_gradients([optimizer], torch.tensor(0.0))
            optimizer.materialize()
    return {name: parameter.detach().clone() for name, parameter in named.items()}, sent


def run_rank(rank: int, world: int, folder: str) -> dict[str, tuple[dict[str, Tensor], dict[str, int]]]:
    layout, found = Layout({"dp": world}, rank), {}
    with shared_peers(Path(folder)):
        for mode, options in MODES.items():
            weights, sent = train(layout, options)
            found[mode] = weights, dataclasses.asdict(sent)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(run_rank, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("mode", MODES)
def test_every_reduction_trains_bit_for_bit_as_the_plain_one(ranks, mode) -> None:
    expected, _ = ranks[0]["plain"]
    assert all(weight.unique().numel() > 8 for weight in expected.values())
    for rank in ranks:
        weights, _ = rank[mode]
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("mode", MODES)
def test_the_steps_send_the_bytes_of_the_formulas(ranks, mode) -> None:
    for number, rank in enumerate(ranks):
        found, expected = Sent(**rank[mode][1]), estimate(mode, number)
        print(f"{mode}, rank {number}: {found}; estimated {expected}")
        assert found == expected


def test_shards_of_a_node_send_a_third_less_between_nodes(ranks) -> None:
    between = {mode: sum(rank[mode][1]["between"] for rank in ranks) for mode in MODES}
    assert between["node"] * 3 == between["plain"] * 2
