"""Embeddings on one GPU: captured, and with lookups and sorting on a stream of their own, they train as eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.distributed.layout import Layout
from common.errors import ConfigError
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.placement import Hybrid, Placement, row_wise
from common.recommendation.row_store import fill
from common.recommendation.slots import SlotFinder
from common.recommendation.tables import Table, Tables, synthetic_ids
from tests.common.recommendation import embedding_ranks as small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = {
    "fp16": {"dtype": torch.float16, "scale": 64.0},
    "bf16": {"dtype": torch.bfloat16},
    "fp16_rows": {"dtype": torch.float16, "rows_dtype": torch.float16, "stochastic_rounding": True, "scale": 64.0},
}


def trained(mode: str, **options: Any) -> dict[str, Any]:
    layout = Layout(device="cuda", seed=small.SEED)
    return small.train(small.plans(1)["mixed"], layout, **MODES[mode], **options)


@pytest.mark.parametrize("mode", MODES)
def test_captured_and_overlapped_training_equals_eager_training(mode):
    plain = trained(mode, overlap=False)
    for options in ({"captured": True, "overlap": False}, {"captured": True, "early": True}, {"early": True}):
        found = trained(mode, **options)
        assert all(torch.equal(found[name], value) for name, value in plain.items()), options


@pytest.mark.parametrize("mode", MODES)
def test_kernels_train_nearly_as_tables_of_pytorch(mode):
    found, start, end = trained(mode, rule=small.RULES["sgd"]), small.reference(iterations=0), small.reference("sgd")
    errors = moved = 0.0
    for number, (first, last) in enumerate(zip(start.rows, end.rows, strict=True)):
        errors += float((found[f"{number}/0/1"].cpu().double() - last).norm())
        moved += float((first - last).norm())
    assert 0 < errors < 0.1 * moved


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_slots_are_those_of_a_cpu_captured_too(slots):
    tables = Tables((Table("a", 40_000, 3), Table("b", 50, 2), Table("c", 900, 20)), 4)
    hybrids = (
        Hybrid(0, tuple(range(0, 40_000, 7)), (2, 0, 1), 40 * slots, 512),
        Hybrid(2, (), (1, 2), 10 * slots, 512),
    )
    plan = Placement(tables, 3, ((), (0,), ()), hybrids)
    generator = torch.Generator().manual_seed(slots)
    batches = [synthetic_ids(tables, 2048, "zipf", generator) for _ in range(3)]
    batches[1][::5, 0], batches[2][3, 7] = -1, 900
    there, here = SlotFinder(plan, torch.device("cuda")), SlotFinder(plan, torch.device("cpu"))
    ids_BL = batches[0].cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there.find(ids_BL)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = there.find(ids_BL)
    for batch in batches:
        ids_BL.copy_(batch)
        graph.replay()
        expected = here.find(batch)
        assert torch.equal(captured.overflow_H.cpu(), expected.overflow_H)
        assert torch.equal(captured.local_BL.cpu(), expected.local_BL)
        assert torch.equal(captured.slot_BK.cpu(), expected.slot_BK)
        ours = int(expected.keys.ours)
        assert int(captured.keys.ours) == ours
        assert torch.equal(captured.keys.row_M.cpu(), expected.keys.row_M)
        assert torch.equal(captured.keys.source_M[:ours].cpu(), expected.keys.source_M[:ours])
        if not expected.overflow_H.any():  # the last slot of a shard with too few is anybody's
            assert torch.equal(captured.requested_S.cpu(), expected.requested_S)


def test_initial_rows_are_those_of_a_cpu():
    there, here = torch.empty(50_000, 128, device="cuda"), torch.empty(50_000, 128)
    for rows in (there, here):
        fill(rows, 3, 40_000_000, 7, 1, 8)
    assert torch.equal(there.cpu(), here)


def test_tables_beyond_the_memory_are_refused():
    tables = Tables((Table("large", 2_000_000_000, 1),), 4096)
    with pytest.raises(ConfigError, match="bytes of rows for cuda"):
        ShardedEmbeddings(row_wise(tables, 1), Layout(device="cuda"), dtype=torch.float16, rows_dtype=torch.float32)
