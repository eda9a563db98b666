"""Tables of host numbers that kernels look up: a CUDA graph that was captured goes on reading those of its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.rgat.graph import BlockShape, device_table
from tests.benchmarks.rgat.random_blocks import SCHEMA

CPU = torch.device("cpu")
MANY = 300
"""Shapes, more than a run has."""


def _shape(capacity: int) -> BlockShape:
    types, relations = len(SCHEMA.types), len(SCHEMA.relations)
    return BlockShape(
        SCHEMA, ((1,) * types, (capacity,) * types), ((capacity,) * relations,), ((capacity,) * relations,)
    )


def _tables() -> dict[str, Callable[[int], Any]]:
    from benchmarks.rgat.ops.edge_attention import triton as edges
    from benchmarks.rgat.ops.gather_rows import triton as gather
    from benchmarks.rgat.ops.projection import tables as products
    from benchmarks.rgat.ops.sample import triton as sample

    return {
        "by_kind": lambda capacity: edges.by_kind(_shape(capacity), 1, CPU, 1, False),
        "by_relation": lambda capacity: edges.by_relation(_shape(capacity), 1, CPU, 64, rows=4),
        "tiles": lambda capacity: products.tiles((capacity,), 64, CPU),
        "relations": lambda capacity: products.relations(_shape(capacity), 1, CPU),
        "node_offsets": lambda capacity: products.node_offsets(_shape(capacity), 1, CPU),
        "into": lambda capacity: products.into(_shape(capacity), 4, CPU),
        "from_types": lambda capacity: products.from_types(_shape(capacity), 1, CPU),
        "parts": lambda capacity: products.parts(((0, capacity, 1, 0),), CPU),
        "programs": lambda capacity: sample._grid((capacity,), sample.TILES["edges"], CPU),
        "types": lambda capacity: gather._type_table((0,), (capacity,), (0,), CPU),
    }


def test_no_table_is_forgotten():
    pytest.importorskip("triton")
    for name, make in _tables().items():
        first = make(1)
        for capacity in range(2, MANY):
            make(capacity)
        assert make(1) is first, name


def test_no_table_is_copied_in_the_capture_of_a_graph(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"):
        device_table([[1, 2], [3, 4]], torch.int32, torch.device("cuda"))
