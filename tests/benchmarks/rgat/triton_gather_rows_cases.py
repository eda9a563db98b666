"""Test the copies of a store's rows by the kernel, and refused inputs.

tests/test_interpreted_kernels.py runs this file.
"""

import pytest
import torch

from benchmarks.rgat.feature_store import build_features
from benchmarks.rgat.ops.gather_rows import ShardedRows
from benchmarks.rgat.ops.gather_rows import triton as gather_triton
from common.distributed.layout import Layout
from tests.benchmarks.rgat import store_ranks as small

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
ROWS = ShardedRows((torch.zeros(10, 16, dtype=torch.uint8),) * 2, (5, 0, 2, 3), (0, 5, 5, 7), CPU)
"""Rows of 16 bytes of four types in two shards."""


def test_a_store_gathers_by_the_kernel(monkeypatch):
    graph, launches = small.made(), []
    monkeypatch.setattr(
        gather_triton, "gather_rows", lambda *given, gather=gather_triton.gather_rows: launches.append(gather(*given))
    )
    small.assert_rows(build_features(small.NODES, small.WIDTH, "local", Layout(), 1, small.from_tables(graph)), graph)
    assert len(launches) == 3


def test_a_block_of_capacity_zero():
    none = torch.zeros(0, dtype=torch.int32)
    out = torch.zeros(0, 16, dtype=torch.uint8)
    gather_triton.gather_rows(ROWS, none, torch.zeros(4, dtype=torch.int32), (0,) * 5, out)


def test_what_does_not_fit_is_refused():
    node, count, offsets = torch.zeros(9, dtype=torch.int32), torch.ones(4, dtype=torch.int32), (0, 5, 5, 7, 9)
    rows, out = ROWS, torch.zeros(9, 16, dtype=torch.uint8)
    for arguments in (
        (rows, node.long(), count, offsets, out),
        (rows, node, count[:3], offsets, out),
        (rows, node, count, offsets, out[:, :8]),
        (rows, node, count, offsets, out[:-1]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            gather_triton.gather_rows(*arguments)
