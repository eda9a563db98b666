"""Features and graphs in their places: the same rows from each, and one error for what does not fit or is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import store_ranks as small
import torch
import torch.multiprocessing as mp

from benchmarks.rgat.stores.features import build_features, from_tables, open_features
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def opened(root: Path, placement: str = "auto", dtype: torch.dtype = small.E4M3, **options):
    arguments = {"schema": small.SCHEMA, "nodes": small.NODES, "width": small.WIDTH} | options
    return open_features(
        root, dtype=dtype, placement=placement, layout=Layout(), ranks_per_node=1, device=CPU, **arguments
    )


# Features


@pytest.mark.parametrize("placement", ["auto", "local", "host"])
@pytest.mark.parametrize("dtype", [small.E4M3, torch.float16, torch.float32], ids=str)
def test_every_node_that_is_there_gets_its_row(tmp_path, placement, dtype):
    graph = small.made(dtype)
    small.write(tmp_path, graph)
    store = opened(tmp_path, placement, dtype)
    assert store.name == ("local" if placement == "auto" else placement)
    assert (store.dtype, store.width) == (dtype, small.WIDTH)
    for seed, counts in enumerate([(17, 12, 2, 0), (0, 0, 0, 0), (25, 15, 3, 1)]):
        block = small.block(seed, CPU, counts)
        out = small.room(block, dtype)
        store.gather(block, store.plan(block), out)
        assert torch.equal(out.view(torch.uint8), small.expected(graph, block))
    store.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_the_same_rows_from_every_placement(tmp_path, world):
    for dtype in (small.E4M3, torch.float16):
        small.write(tmp_path / str(dtype), small.made(dtype))
    placements = ("auto", "host", "exchange")
    mp.start_processes(small.run_rank, args=(world, str(tmp_path), placements), nprocs=world, start_method="forkserver")
    for rank in range(world):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == 2 * 5 * len(placements)
        for case, (name, wrong) in found.items():
            assert wrong == 0, case
            assert name == ("local" if case.startswith("auto") else case.split()[0])
