"""What the benchmark of SSD300's operation measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ssd300.ops import class_entropy
from benchmarks.ssd300.ops.bench import entries, sweeps
from common.ops.bench import cases
from tests.references import run_references


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the reference stands in for the kernel, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(monkeypatch, class_entropy.CLASS_ENTROPY)


@pytest.mark.usefixtures("without_memory")
def test_every_pass_runs_and_moves_the_logits_once_and_twice() -> None:
    assert [entry.calls for entry in entries()] == [1, 0]
    for entry in entries():
        forward, backward = entry.build(114, torch.float16)
        assert forward.bytes == pytest.approx(114 * 8732 * (81 * 2 + 4 * 2 * 2 + 16))
        assert backward.bytes == pytest.approx(114 * 8732 * (2 * 81 * 2 + 4 * 2 * 2 + 16))
        forward.run()
        backward.run()


@pytest.mark.usefixtures("without_memory")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in sweeps().items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
        sweep.build(torch.float16)[sweep.backward].run()
