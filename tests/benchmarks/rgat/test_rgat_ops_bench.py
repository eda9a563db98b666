"""What the benchmark of R-GAT's operations measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.rgat.ops import bench, bench_blocks, projection
from benchmarks.rgat.ops.bench import sweeps
from benchmarks.rgat.ops.projection.bench_cases import entries
from common.ops.bench import cases
from common.ops.implementation import always


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the plain implementation stands in for the kernels, which have no such version."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    implementations = projection.IMPLEMENTATIONS
    stand_in = replace(implementations["triton"], function=implementations["torch"].function, unsupported=always)
    monkeypatch.setitem(implementations, "triton", stand_in)


def test_every_operation_is_measured() -> None:
    names = [entry.name for entry in bench.entries()]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names} == {"sample", "gather_rows", "products", "edge_attention"}


def test_every_tile_can_be_swept() -> None:
    pytest.importorskip("triton")
    from benchmarks.rgat.ops.edge_attention import triton as edge_attention
    from benchmarks.rgat.ops.gather_rows import triton as gather_rows
    from benchmarks.rgat.ops.projection import triton as products
    from benchmarks.rgat.ops.sample import triton as sample

    for operation in (sample, gather_rows, products, edge_attention):
        assert {sweep.key for sweep in sweeps().values() if sweep.table is operation.TILES} == set(operation.TILES)


@pytest.mark.usefixtures("without_memory")
def test_every_pass_runs_at_the_real_size() -> None:
    for entry in entries():
        for own in entry.build(2048, torch.bfloat16):
            own.run()
            assert own.bytes > 0
            assert own.flops > 0


@pytest.mark.usefixtures("without_memory")
def test_the_first_convolution_projects_its_rows_and_no_more() -> None:
    entry = next(entry for entry in entries() if entry.calls)
    forward = entry.build(2048, torch.bfloat16)[0]
    assert forward.flops == pytest.approx(2048 * 1261.38 * 2 * 1024 * 512, rel=1e-5)


@pytest.mark.usefixtures("without_memory")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in sweeps().items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice))[: len(choice)] for choice in sweep.choices] == list(sweep.choices), name


def test_rows_of_a_made_up_block_are_nodes_of_their_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    block = bench_blocks.block(20)
    room = block.shape
    for relation, source in enumerate(room.schema.sources):
        first, into = room.row_offsets(room.hops)[relation], room.node_row_offsets[relation]
        for level in range(1, room.hops + 1):
            count = int(block.row_counts[level - 1, relation])
            node = block.rows[first : first + count]
            assert count == bench_blocks.rows(20)[level - 1][relation]
            assert ((node >= 0) & (node < block.node_counts[level, source])).all()
            if level < room.hops:
                assert torch.equal(block.node_row[into + node.long()], torch.arange(count, dtype=torch.int32))
