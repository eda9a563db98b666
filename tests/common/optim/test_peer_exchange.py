"""Copies between the shards of two ranks: their order, sums with clip factors, and refusals.

Whole trainings through them: test_sharded_optimizer.py, test_split_samples.py and test_hierarchical_reduction.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sharded_ranks import CLIPS, Trainee
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory
from common.errors import ConfigError
from common.optim.adaptive import LAMB
from common.optim.learning_rate import constant
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.peer_exchange import PeerExchange, add_pieces
from common.step.train_step import apply_gradients
from tests.gloo_ranks import on_ranks
from tests.shared_peers import shared_peers

COPIED: dict[str, Any] = {"shard": "all", "exchange": "copy_engines"}


def events(layout: Layout, **options: Any) -> dict[str, list[str]]:
    """Return the barriers and copies of a step, of ``materialize`` after it, and of a step without traffic."""
    trainee = Trainee(layout, **COPIED, **options)
    seen: list[str] = []
    barrier, copy = PeerMemory.barrier, PeerExchange.copy
    pulled = {gather.weights.data_ptr() for gather in trainee.optimizer._gatherer._gathers}

    def copying(exchange: PeerExchange, copies: Any) -> Any:
        copies = list(copies)
        seen.append("pull" if {target.data_ptr() for target, _ in copies} & pulled else "push")
        return copy(exchange, copies)

    def meeting(memory: PeerMemory) -> None:
        seen.append("barrier")
        barrier(memory)

    found = {}
    with mock.patch.object(PeerMemory, "barrier", meeting), mock.patch.object(PeerExchange, "copy", copying):
        for name, work in (
            ("step", lambda: trainee.iterate(0)),
            ("materialize", trainee.step.materialize),
            ("silenced", lambda: (trainee.optimizer.stop_sending(), trainee.iterate(1))),
        ):
            seen.clear()
            work()
            found[name] = list(seen)
    return found


def kinds(seen: list[str]) -> list[str]:
    """Return events in which copies of the same kind, one after the other, are one event."""
    return [kind for kind, _ in itertools.groupby(seen)]


def clipped(layout: Layout, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Return the weights after two steps that clip each rank's only micro-batch, and how many buckets were early."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))).to(dtype)
    optimizer = Optimizer(
        [ParameterGroup(dict(model.named_parameters()), 0.01, trust_ratio=True)], LAMB(), constant(0.125), layout,
        grad_divisor=2.0, bucket_bytes=2000, blocks=list(model.named_children()),
        clip=ClipNorm(0.01, "before_reduction"), shard="all", **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(layout.rank)
    for _ in range(2):
        optimizer.begin()
        optimizer.arm()
        model(torch.randn(3, 24, generator=generator).to(dtype)).square().sum().backward()
        launched = optimizer._reducer.launched
        optimizer.collect()
        assert not apply_gradients([optimizer], torch.tensor(0.0))
    optimizer.materialize()
    words = optimizer.choices["gradient reduction"]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"weights": weights, "launched": launched, "buckets": optimizer._reducer.buckets, "words": words}


def refused(layout: Layout) -> str:
    try:
        Trainee(layout, **COPIED)
    except ConfigError as error:
        return str(error)
    return ""


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    layout = Layout({"dp": world}, rank, seed=7)
    found: dict[str, Any] = {"refused": refused(layout)}
    with shared_peers(Path(folder)):
        found["events"] = events(layout)
        found["events, no blocks"] = events(layout, blocks=False)
        found["events, clipped"] = events(layout, clip=CLIPS["before"])
        for dtype in (torch.float32, torch.bfloat16):
            for exchange in ("collectives", "copy_engines"):
                found[f"{dtype}/{exchange}"] = clipped(layout, dtype, exchange=exchange)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(run_rank, 2, tmp_path_factory.mktemp("ranks"))


def test_a_step_has_a_barrier_before_its_pulls_and_one_after_its_pushes(ranks):
    for rank in ranks:
        assert kinds(rank["events"]["step"]) == ["barrier", "pull", "push", "barrier"]
        assert kinds(rank["events, clipped"]["step"]) == ["barrier", "pull", "push", "barrier"]
        assert kinds(rank["events, no blocks"]["step"]) == ["barrier", "push", "barrier", "pull", "barrier"]


def test_weights_are_pulled_between_two_barriers_when_they_are_materialized(ranks):
    assert [kinds(rank["events"]["materialize"]) for rank in ranks] == [["barrier", "pull", "barrier"]] * 2


def test_without_traffic_only_the_barriers_remain(ranks):
    for rank in ranks:
        assert rank["events"]["silenced"] == ["barrier"] * 2
        assert rank["events, no blocks"]["silenced"] == ["barrier"] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_of_unclipped_pieces_with_their_factors_has_the_bits_of_clipped_pieces(ranks, dtype):
    for rank in ranks:
        copied = rank[f"{dtype}/copy_engines"]["weights"]
        for name, weight in rank[f"{dtype}/collectives"]["weights"].items():
            assert torch.equal(copied[name], weight)


def test_unclipped_gradients_are_sent_during_the_backward_pass(ranks):
    for rank in ranks:
        late, early = (rank[f"torch.float32/{exchange}"] for exchange in ("collectives", "copy_engines"))
        assert late["launched"] == 0
        assert early["launched"] == early["buckets"] > 3
        assert late["words"].endswith("after the backward pass, as clipping comes before")
        assert early["words"].endswith("during the backward pass")


# Sums


def rounded_sum(pieces: list[Tensor], factors: list[float] | None) -> Tensor:
    """Return the sum in float64 of pieces, of which each product with its factor is rounded to the pieces' dtype."""
    dtype = pieces[0].dtype
    if factors is not None:
        pieces = [(piece.double() * factor).to(dtype) for piece, factor in zip(pieces, factors, strict=True)]
    return torch.stack([piece.double() for piece in pieces]).sum(0).to(dtype)


@pytest.mark.parametrize("factors", [None, [0.5, 0.3125, 0.75]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pieces_are_added_with_one_rounding_into_the_first_slot(dtype, factors):
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(128, generator=generator).to(dtype)
    slots = torch.randn(4, 256, generator=generator).to(dtype)
    before, staged = slots.clone(), slots[1::2, 64:192]
    expected = rounded_sum([own, *staged.clone()], factors)
    wide = torch.promote_types(dtype, torch.float32)
    given = torch.tensor(factors or [0.0] * 3, dtype=wide)
    add_pieces(own, staged, staged[0], None if factors is None else given[0], given[1:])
    # The sum of 16-bit values is rounded once; partial sums of wider ones are rounded, too.
    assert torch.allclose(
        staged[0], expected, rtol=0.0, atol=0.0 if dtype.itemsize == 2 else 8 * torch.finfo(dtype).eps
    )
    slots[1, 64:192] = before[1, 64:192]
    assert torch.equal(slots, before)


# Refusals


def test_ranks_that_map_no_memory_are_refused_with_the_reason_and_the_remedy(ranks):
    expected = (
        "optimizer.exchange=copy_engines: it needs CUDA devices, not cpu; use optimizer.exchange=collectives, or on "
        "several machines optimizer.shard=node, with which only the ranks of one machine share"
    )
    assert [rank["refused"] for rank in ranks] == [expected] * 2


@pytest.mark.parametrize("options", [{}, {"shard": "all", "reduction": "all_reduce"}], ids=str)
def test_copies_without_a_scatter_are_refused(options):
    with pytest.raises(ConfigError, match=r"replaces a scatter to shards: set optimizer\.shard to node or all"):
        Trainee(Layout(seed=7), exchange="copy_engines", **options)


def test_one_rank_copies_nothing():
    alone, plain = (Trainee.train(Layout(seed=7), shard="all", exchange=e) for e in ("copy_engines", "collectives"))
    assert all(torch.equal(alone[name], weight) for name, weight in plain.items())
