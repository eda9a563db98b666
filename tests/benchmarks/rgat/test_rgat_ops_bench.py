"""What the benchmark of R-GAT's operations measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.block import Block
from benchmarks.rgat.ops import bench, projection
from benchmarks.rgat.ops.bench import sweeps
from benchmarks.rgat.ops.bench_block import bench_block
from benchmarks.rgat.ops.projection import bench_cases
from common.ops.bench import cases
from tests.references import run_references

SEEDS = 3
CPU = torch.device("cpu")


def small_block(seeds: int, device: torch.device) -> Block:
    return bench_block(seeds, device, 300)


@pytest.fixture
def small_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small graph, narrow products, and the reference in the place of the kernels."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(bench_cases, "bench_block", small_block)
    monkeypatch.setattr(bench_cases, "FEATURES", 24)
    monkeypatch.setattr(bench_cases, "HEAD_SIZE", 3)
    run_references(monkeypatch, projection.PROJECTION)


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


@pytest.mark.usefixtures("small_on_the_cpu")
def test_every_pass_runs() -> None:
    for entry in bench_cases.entries():
        for own in entry.build(SEEDS, torch.bfloat16):
            own.run()
            assert own.bytes > 0
            assert own.flops > 0


@pytest.mark.usefixtures("small_on_the_cpu")
def test_the_first_convolution_projects_its_rows_and_no_more() -> None:
    entry = next(entry for entry in bench_cases.entries() if entry.calls)
    forward = entry.build(SEEDS, torch.bfloat16)[0]
    block = small_block(SEEDS, CPU)
    rows = [
        len(set(block.edge_row[first : first + count].tolist()))
        for first, count in zip(block.shape.edge_offsets, block.edge_counts[2].tolist(), strict=False)
    ]
    assert forward.flops == sum(rows) * 2 * 24 * (4 * 3)


@pytest.mark.usefixtures("small_on_the_cpu")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in sweeps().items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice))[: len(choice)] for choice in sweep.choices] == list(sweep.choices), name


def test_rows_of_a_made_up_block_are_nodes_of_their_level() -> None:
    block = small_block(SEEDS, CPU)
    room = block.shape
    assert int((block.edge_counts[-1] > 0).sum()) > 8
    for relation, source in enumerate(room.schema.sources):
        first, into = room.row_offsets(room.hops)[relation], room.node_row_offsets[relation]
        for level in range(1, room.hops + 1):
            count = int(block.row_counts[level - 1, relation])
            node = block.rows[first : first + count]
            edges = block.edge_row[room.edge_offsets[relation] :][: int(block.edge_counts[level - 1, relation])]
            assert set(edges.tolist()) == set(range(count))
            assert ((node >= 0) & (node < block.node_counts[level, source])).all()
            if level < room.hops:
                assert torch.equal(block.node_row[into + node.long()], torch.arange(count, dtype=torch.int32))
