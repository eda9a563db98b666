"""What the bench of stores times is a gather of all that it asks for."""

from __future__ import annotations

import torch

from benchmarks.rgat.store_bench import WIDTH, copied, gathered, random_block
from benchmarks.rgat.stores.features import build_features, from_tables
from benchmarks.rgat.stores.placement import EXCHANGE, HOST, LOCAL
from common.distributed.layout import Layout


def test_the_block_asks_for_rows_that_are_there() -> None:
    table = torch.randint(256, (50, WIDTH), dtype=torch.uint8)
    store = build_features(
        (50,), WIDTH, torch.float8_e4m3fn, LOCAL, Layout(), 1, torch.device("cpu"), from_tables([table])
    )
    block = random_block(50, 200, torch.device("cpu"), 3)
    out = torch.zeros((200, WIDTH), dtype=torch.float8_e4m3fn)
    store.gather(block, store.plan(block), out)
    assert torch.equal(out.view(torch.uint8), table[block.nodes.long()])
    assert len(block.nodes.unique()) > 40


def test_every_placement_of_one_rank_can_be_timed() -> None:
    for placement in (LOCAL, HOST):
        assert gathered(placement, 100, 30, Layout(), None, 1) > 0
        assert copied(placement, Layout(), 1, size=1 << 12) > 0
    assert copied(EXCHANGE, Layout(), 1, size=1 << 12) is None
