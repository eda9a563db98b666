"""What the benchmark of operations measures of R-GAT's gather."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.ops import gather_rows
from benchmarks.rgat.ops.bench_block import bench_block
from benchmarks.rgat.ops.gather_rows import bench_cases
from common.ops.bench import cases
from tests.references import run_references


@pytest.fixture
def small_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small graph, and the reference in the place of the kernel."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(bench_cases, "PAPERS", 300)
    run_references(monkeypatch, gather_rows.GATHER_ROWS)


@pytest.mark.usefixtures("small_on_the_cpu")
def test_every_case_runs_and_moves_each_row_twice() -> None:
    found, seen = int(bench_block(4, torch.device("cpu"), 300).node_counts[-1].sum()), 0
    for entry in bench_cases.entries():
        if entry.name.startswith("gather_rows host"):
            continue  # no memory can be pinned without a GPU
        (forward,) = entry.build(4, torch.float16)
        assert forward.bytes == found * (2 * 1024 + 4)
        forward.run()
        seen += 1
    assert seen == 2 + 1 + len(bench_cases.CAPPED)


@pytest.mark.usefixtures("small_on_the_cpu")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in bench_cases.sweeps().items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
