"""Test R-GAT's stores on several GPUs: four placements give the same rows, and all GPUs read all shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.rgat.graph import Graph
from common.distributed import symmetric_memory
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory, attempt
from tests.benchmarks.rgat import store_ranks as small
from tests.benchmarks.rgat.sample_oracle import sharded

pytestmark = pytest.mark.multigpu


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device, root = torch.device("cuda", rank), Path(folder)
    layout = Layout({"dp": world}, rank, device=device)
    if rank == 0:
        small.write(root, small.made())
    dist.barrier()
    results: dict[str, Any] = {}
    group = layout.node(world)
    assert group is not None
    memory, reason = attempt(lambda: PeerMemory.allocate(4096, group, device), group, device)
    if memory is None:
        results["unsupported"] = reason
    else:
        results["addresses"] = own_numbers(memory, group)
        results["graph"] = small.seen(layout, root)
        results["stores"] = small.gathered(layout, root)
    return results


def own_numbers(memory: PeerMemory, group: dist.ProcessGroup) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers that the ranks wrote into their buffers, and two lists of the buffers' addresses."""
    device = torch.device("cuda", memory.rank)
    parts = memory.tensors((2,), torch.int64, 16)
    parts[memory.rank].fill_(memory.rank + 10)
    symmetric_memory.gathered(0, group, device)
    found = [int(part[1].to(device)) for part in parts]
    symmetric_memory.gathered(0, group, device)  # none is freed before all have read
    return found, memory.addresses.tolist(), [part.data_ptr() - 16 for part in parts]


def supported(ranks: list[dict[str, Any]]) -> None:
    if "unsupported" in ranks[0]:
        pytest.skip(ranks[0]["unsupported"])


def test_every_rank_reads_what_the_others_wrote(ranks):
    supported(ranks)
    for rank in ranks:
        numbers, addresses, pointers = rank["addresses"]
        assert numbers == [10 + number for number in range(len(ranks))]
        assert addresses == pointers


def test_four_placements_give_the_same_rows(ranks):
    supported(ranks)
    for rank in ranks:
        assert rank["stores"] == {case: (name, 0) for case, name in small.PLACED.items()}


def test_every_rank_sees_the_shards_of_all(ranks):
    supported(ranks)
    made = small.made()
    indptr, indices = (tuple((one,) for one in of) for of in (made.indptr, made.indices))
    cut = sharded(Graph(small.SCHEMA, small.NODES, indptr, indices, small.CPU), len(ranks))
    for rank in ranks:
        indptr, indices = rank["graph"]
        for number in range(len(made.indptr)):
            for shard in range(len(ranks)):
                assert torch.equal(indptr[number][shard], cut.indptr[number][shard])
                assert torch.equal(indices[number][shard], cut.indices[number][shard])
