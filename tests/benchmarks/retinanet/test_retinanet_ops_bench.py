"""What the benchmark of RetinaNet's operations measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.retinanet.ops import focal_loss
from benchmarks.retinanet.ops.bench import entries, sweeps
from common.ops.bench import cases
from tests.references import run_references


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the reference stands in for the kernel, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(monkeypatch, focal_loss.FOCAL_LOSS)


@pytest.mark.usefixtures("without_memory")
def test_every_pass_runs_and_moves_the_logits_twice() -> None:
    for entry in entries():
        forward, backward = entry.build(32, torch.float16)
        assert forward.bytes == pytest.approx(32 * 120_087 * (2 * 264 * 2 + 8))
        forward.run()
        backward.run()


@pytest.mark.usefixtures("without_memory")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in sweeps().items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
