"""Embeddings exchanged through memory that the ranks of a machine share: bits, order of accesses, size, and refusals.

Files that gloo ranks map are the shared memory.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import embedding_ranks as small
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.embedding_bags import SgdRows
from common.optim.learning_rate import constant
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.placement import Placement
from common.recommendation.tables import Table, Tables
from tests.capturable import Capturable
from tests.gloo_ranks import on_ranks
from tests.shared_peers import SharedHandle, shared_peers

RANKS = 2
PLANS = small.plans(RANKS)
MODES: dict[str, dict[str, Any]] = {
    "float64": {},
    "fp16": {"rule": small.RULES["sgd"], "dtype": torch.float16, "scale": 64.0, "early": True},
}

# Training: every plan


def train(plan: Placement, layout: Layout, peer_batch: int | None, **options: Any) -> dict[str, Any]:
    """Return x0 of an evaluation of twice the samples after each iteration, and the state at the end."""
    trainee, found = small.Trainee(plan, layout, peer_batch=peer_batch, **options), {}
    for iteration in range(small.ITERATIONS):
        trainee.iterate(iteration)
        ids_BL = torch.cat([small.micro_batch(9, number)["ids_BL"] for number in range(2)])
        bottom_BW = torch.ones(len(ids_BL), small.TABLES.width, dtype=trainee.dtype)
        with torch.no_grad():
            found[f"evaluation {iteration}"] = trainee.embeddings.forward(bottom_BW, ids_BL)
    return found | trainee.parts()


def capture(layout: Layout) -> str:
    """Return why a graph cannot capture the exchange of a micro-batch, and its update."""
    trainee = small.Trainee(PLANS["hybrid_mixed"], layout, peer_batch=small.SAMPLES)
    trainee.iterate(0)
    batches = [trainee.batch(1, number) for number in range(trainee.micro_batches)]
    with mock.patch.object(dist, "all_to_all_single"), mock.patch.object(dist, "all_reduce"):
        try:
            with Capturable():
                for batch in batches:
                    trainee.loss(batch).total.backward()
                trainee.updater.write(~trainee.updater.measure())
        except AssertionError as error:
            return str(error)
    return ""


# Order of accesses: one rank is always ahead of the other one


TABLES = Tables((Table("a", 40, 3), Table("b", 64, 1), Table("c", 24, 2), Table("d", 50, 6)), 4)
STEPS, BATCH = 4, 5
ORDERS = [(leader, micro_batches) for leader in range(RANKS) for micro_batches in (1, 2)]


def build(layout: Layout, peer_batch: int | None) -> ShardedEmbeddings:
    """Return embeddings without replicated tables, some of which are split."""
    plan = Placement(TABLES, RANKS, ((1, 0), (0,), (0, 1), (1,)))
    return ShardedEmbeddings(plan, layout, dtype=torch.float32, peer_batch=peer_batch)


def steps(embeddings: ShardedEmbeddings, micro_batches: int) -> list[Tensor]:
    """Train; return x0 of all lookups, and the rows at the end. The backward pass reads x0."""
    updater = EmbeddingUpdater(
        embeddings, SgdRows(), constant(0.5), grad_divisor=float(micro_batches), micro_batches=micro_batches
    )
    seen = []
    for step in range(STEPS):
        for number in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + embeddings.layout.rank)
            ids = [
                torch.randint(table.rows, (BATCH, table.hotness), generator=generator, dtype=torch.int32)
                for table in TABLES.tables
            ]
            bottom_BW = torch.randn(BATCH, TABLES.width, generator=generator).requires_grad_()
            x0_BX = embeddings.forward(bottom_BW, torch.cat(ids, 1))
            seen.append(x0_BX.detach().clone())
            (x0_BX * x0_BX).sum().backward()
        updater.write(~updater.measure())
    return [*seen, embeddings.store.rows_RW]


def in_turns(layout: Layout, leader: int, micro_batches: int) -> list[Tensor]:
    """Return the results of :func:`steps` when all that the leader does between two barriers comes before what the
    follower does between them. No collective orders anything else.

    Each of them passes a barrier of gloo at the end of its part, and waits at another one for the end of the other's.
    """
    group, follows, embeddings = layout.group("dp"), layout.rank != leader, build(layout, BATCH)
    wait = dist.barrier

    def barrier(handle: SharedHandle, channel: int) -> None:
        wait(group)
        wait(group)

    with (
        mock.patch.object(SharedHandle, "barrier", barrier),
        mock.patch.object(dist, "all_reduce"),
        mock.patch.object(dist, "all_to_all_single", side_effect=AssertionError("a collective")),
    ):
        if follows:
            wait(group)  # the leader has finished its first part
        found = steps(embeddings, micro_batches)
        if not follows:
            wait(group)  # the follower begins its last part
    return found


def refused(layout: Layout, peer_batch: int) -> str:
    try:
        steps(build(layout, peer_batch), 1)
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    layout, found = Layout({"dp": world}, rank, seed=small.SEED), {}
    numbers = itertools.count()

    def peers() -> contextlib.AbstractContextManager[None]:
        place = Path(folder) / f"peers_{next(numbers)}"
        place.mkdir(exist_ok=True)
        return shared_peers(place)

    for name, plan in PLANS.items():
        for mode, options in MODES.items():
            found[f"{name}/{mode}/collectives"] = train(plan, layout, None, **options)
            with peers():
                found[f"{name}/{mode}"] = train(plan, layout, small.SAMPLES, **options)
    for micro_batches in (1, 2):
        found[f"collectives/{micro_batches}"] = steps(build(layout, None), micro_batches)
        for leader in range(RANKS):
            with peers():
                found[f"in turns/{leader}/{micro_batches}"] = in_turns(layout, leader, micro_batches)
    found["no peers"] = refused(layout, BATCH)
    with peers():
        found["other batch"] = refused(layout, BATCH - 1)
    with peers():
        found["size"] = build(layout, BATCH).peer_bytes
    with peers():
        found["capture"] = capture(layout)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(run_rank, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLANS)
def test_training_and_evaluation_have_the_bits_of_collectives(ranks, name, mode):
    for rank in ranks:
        found, expected = rank[f"{name}/{mode}"], rank[f"{name}/{mode}/collectives"]
        assert found.keys() == expected.keys()
        assert [part for part, value in expected.items() if not torch.equal(found[part], value)] == []


@pytest.mark.parametrize(("leader", "micro_batches"), ORDERS)
def test_no_rank_overwrites_what_a_slower_one_has_still_to_read(ranks, leader, micro_batches):
    for rank in ranks:
        found, expected = rank[f"in turns/{leader}/{micro_batches}"], rank[f"collectives/{micro_batches}"]
        assert len(found) == STEPS * micro_batches + 1
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(found, expected, strict=True))


def test_a_graph_can_hold_the_exchange(ranks):
    assert [rank["capture"] for rank in ranks] == [""] * RANKS


def test_the_memory_is_that_of_ids_gradients_x0_and_parts(ranks):
    # A rank has at most 11 of a sample's ids, 3 shards, and 4 parts of the two split tables. Each part begins at a
    # multiple of 256 bytes.
    vector = 4 * TABLES.width
    ids, gradients, vectors = 2 * BATCH * 11 * 4, 2 * BATCH * 3 * vector, BATCH * (1 + 4 + 4) * vector
    expected = sum(-(-size // 256) * 256 for size in (ids, gradients, vectors))
    assert [rank["size"] for rank in ranks] == [expected] * RANKS


def test_ranks_that_map_no_memory_are_refused_with_the_reason_and_the_remedy(ranks):
    message = "embeddings.exchange=peer_memory: it needs CUDA devices, not cpu; use embeddings.exchange=collectives"
    assert [rank["no peers"] for rank in ranks] == [message] * RANKS


def test_a_micro_batch_of_another_size_is_refused(ranks):
    assert [rank["other batch"] for rank in ranks] == ["a micro-batch of 5 samples, in memory for 4"] * RANKS
