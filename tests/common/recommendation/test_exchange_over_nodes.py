"""Four ranks as two nodes of two: an exchange over nodes and hybrid tables look up and train bit for bit as a plain
exchange, and send the bytes that follow from the placement.

Rows and gradients are multiples of a power of two, whose float32 sums are exact in every order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from common.distributed.layout import Layout
from common.ops.embedding_bags import SgdRows
from common.optim.learning_rate import constant
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.exchange_over_nodes import ExchangeOverNodes
from common.recommendation.placement import Hybrid, Placement, row_wise
from common.recommendation.tables import Table, Tables
from tests.counted_messages import Sent, counted
from tests.gloo_ranks import on_ranks

RANKS, NODE, BATCH, STEPS = 4, 2, 8, 3
TABLES = Tables((Table("a", 40, 3), Table("b", 64, 1), Table("c", 24, 2), Table("d", 50, 6)), 16)
EVERY = tuple(range(RANKS))
PLAIN = "plain"
PLACEMENTS: dict[str, tuple[Placement, int | None]] = {
    PLAIN: (row_wise(TABLES, RANKS), None),
    "over nodes": (row_wise(TABLES, RANKS), NODE),
    "tables on one node": (Placement(TABLES, RANKS, ((0, 1), (2, 3), (0, 1), (2, 3))), NODE),
    "hybrid": (
        Placement(
            TABLES, RANKS, ((),) * 4,
            tuple(Hybrid(number, tuple(range(4)), EVERY, 16, BATCH) for number in range(len(TABLES))),
        ),
        None,
    ),
    "hybrid and over nodes": (
        Placement(TABLES, RANKS, ((), EVERY, (0, 1), EVERY), (Hybrid(0, tuple(range(5)), EVERY, 16, BATCH),)), NODE
    ),
}  # fmt: skip
"""Name to placement and, for an exchange over nodes, the ranks of a node."""


def lookups(plan: Placement, rank: int) -> int:
    """Return the ids of a sample that a rank with these shards receives."""
    return sum(TABLES.tables[shard.table].hotness for shard in plan.shards_of(rank))


def slots(plan: Placement, rank: int) -> int:
    """Return the rare rows that a rank's samples request of ``rank``."""
    return sum(
        hybrid.capacity(shard, BATCH, TABLES)
        for hybrid in plan.hybrids
        for shard in plan.rare_shards_of(rank)
        if shard.table == hybrid.table
    )


def estimate(name: str, rank: int) -> Sent:
    """Return the bytes of all steps: ids of 4 bytes, and vectors of W elements of 4 bytes as sums and as gradients.

    Directly: a rank sends to each other one the ids of its tables, a vector and a gradient for each shard and sample.
    Over nodes: along the rail, a vector and a gradient for each table and sample; among neighbours, for each shard and
    sample of the whole rail. Rare rows: an id and a gradient for each slot of the other rank, a row for each own slot.
    """
    plan, over_nodes = PLACEMENTS[name]
    vector, own, sent = 4 * TABLES.width, len(plan.shards_of(rank)), Sent()
    frequent = sum(len(hybrid.frequent) for hybrid in plan.hybrids)
    for other in range(RANKS):
        if other == rank:
            continue
        neighbour = other // NODE == rank // NODE
        size = 4 * slots(plan, other) + vector * (slots(plan, rank) + slots(plan, other))
        theirs = len(plan.shards_of(other))
        if over_nodes is None:
            size += BATCH * (4 * lookups(plan, other) + vector * (own + theirs))
        elif neighbour:
            size += 2 * BATCH * (vector * (own + theirs))  # of the samples of two ranks
        elif other % NODE == rank % NODE:
            here, there = (tables_of(plan, one // NODE) for one in (rank, other))
            ids = sum(TABLES.tables[table].hotness for table in there)
            size += BATCH * (4 * ids + vector * (len(here) + len(there)))
        if neighbour:
            sent.inside += size
        else:
            sent.between += size
    if over_nodes is not None:  # neighbours gather the ids that came along their rails
        sent.inside += 2 * BATCH * 4 * sum(TABLES.tables[table].hotness for table in tables_of(plan, rank // NODE))
    if frequent:  # gradients of frequent rows, a flag, and whether the slots sufficed, in a ring over all ranks
        ring = 2 * (RANKS - 1) * (4 * (frequent * TABLES.width + 1 + len(plan.hybrids)) // RANKS)
        sent.inside += ring * (rank % NODE < NODE - 1)
        sent.between += ring * (rank % NODE == NODE - 1)
    return Sent(STEPS * sent.inside, STEPS * sent.between)


def tables_of(plan: Placement, node: int) -> list[int]:
    """Return the tables with shards on a node."""
    ranks = range(node * NODE, (node + 1) * NODE)
    return [table for table, holders in enumerate(plan.holders) if set(holders) & set(ranks)]


def micro_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, L) with duplicates, and the gradient of x0, small integers."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    ids = [
        torch.randint(0, table.rows // 2, (BATCH, table.hotness), generator=generator, dtype=torch.int32)
        for table in TABLES.tables
    ]
    gradient_BX = torch.randint(-4, 5, (BATCH, (1 + len(TABLES)) * TABLES.width), generator=generator).float()
    return torch.cat(ids, 1), gradient_BX


def train(name: str, layout: Layout) -> tuple[list[Tensor], Sent]:
    """Return x0 of every step, and the bytes that the steps have sent."""
    plan, ranks_per_node = PLACEMENTS[name]
    embeddings = ShardedEmbeddings(plan, layout, dtype=torch.float32, ranks_per_node=ranks_per_node)
    assert isinstance(embeddings.exchange, ExchangeOverNodes) == (ranks_per_node is not None)
    for store in (embeddings.store, embeddings.replicated, *((embeddings.rare.store,) if embeddings.rare else ())):
        store.rows_RW.mul_(1024).round_().div_(1024)
    updater = EmbeddingUpdater(embeddings, SgdRows(), constant(0.5), grad_divisor=float(RANKS))
    seen = []
    with counted(layout.rank, NODE) as sent:
        for step in range(STEPS):
            ids_BL, gradient_BX = micro_batch(step, layout.rank)
            bottom_BW = torch.zeros(BATCH, TABLES.width, requires_grad=True)
            x0_BX = embeddings.forward(bottom_BW, ids_BL)
            seen.append(x0_BX.detach().clone())
            x0_BX.backward(gradient_BX)
            assert not updater.measure()
            updater.write(torch.tensor(True))
    return seen, sent


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    layout, found = Layout({"dp": world}, rank, seed=1), {}
    for name in PLACEMENTS:
        seen, sent = train(name, layout)
        found[name] = seen, dataclasses.asdict(sent)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(run_rank, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_exchange_trains_bit_for_bit_as_the_plain_one(ranks, name) -> None:
    for rank in ranks:
        expected, found = rank[PLAIN][0], rank[name][0]
        assert not torch.equal(expected[0], expected[-1])
        assert all(torch.equal(x0_BX, wanted_BX) for x0_BX, wanted_BX in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_steps_send_the_bytes_that_follow_from_the_placement(ranks, name) -> None:
    for number, rank in enumerate(ranks):
        found, expected = Sent(**rank[name][1]), estimate(name, number)
        print(f"{name}, rank {number}: {found}; estimated {expected}")
        assert found == expected


def test_an_exchange_over_nodes_of_two_sends_half_of_the_vectors_between_nodes(ranks) -> None:
    for rank in ranks:
        direct, over_nodes = (rank[name][1]["between"] for name in (PLAIN, "over nodes"))
        assert over_nodes * 2 == direct
