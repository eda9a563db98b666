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


def _shape(room: int) -> BlockShape:
    types, relations = len(SCHEMA.types), len(SCHEMA.relations)
    return BlockShape(SCHEMA, ((1,) * types, (room,) * types), ((room,) * relations,), ((room,) * relations,))


def _tables() -> dict[str, Callable[[int], Any]]:
    from benchmarks.rgat.ops.edge_attention import triton as edges
    from benchmarks.rgat.ops.gather_rows import triton as gather
    from benchmarks.rgat.ops.projection import tables as products
    from benchmarks.rgat.ops.sample import triton as sample

    return {
        "by_kind": lambda room: edges.by_kind(_shape(room), 1, CPU, 1, False),
        "by_relation": lambda room: edges.by_relation(_shape(room), 1, CPU, 64, rows=4),
        "tiles": lambda room: products.tiles((room,), 64, CPU),
        "relations": lambda room: products.relations(_shape(room), 1, CPU),
        "node_offsets": lambda room: products.node_offsets(_shape(room), 1, CPU),
        "into": lambda room: products.into(_shape(room), 4, CPU),
        "from_types": lambda room: products.from_types(_shape(room), 1, CPU),
        "parts": lambda room: products.parts(((0, room, 1, 0),), CPU),
        "programs": lambda room: sample._grid((room,), sample.TILES["edges"], CPU),
        "types": lambda room: gather._type_table((0,), (room,), (0,), CPU),
    }


def test_no_table_is_forgotten() -> None:
    pytest.importorskip("triton")
    for name, make in _tables().items():
        first = make(1)
        for room in range(2, MANY):
            make(room)
        assert make(1) is first, name


def test_no_table_is_copied_in_the_capture_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"):
        device_table([[1, 2], [3, 4]], torch.int32, torch.device("cuda"))
