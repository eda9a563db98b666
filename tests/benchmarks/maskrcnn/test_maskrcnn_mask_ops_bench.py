"""What the benchmarks of mask targets and of the virtual paste measure, at sizes for a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.ops import mask_targets, paste
from benchmarks.maskrcnn.ops.mask_targets import bench_cases as targets_bench
from benchmarks.maskrcnn.ops.paste import bench_cases as paste_bench
from benchmarks.maskrcnn.polygon_table import PolygonRoom
from common.ops.bench import cases
from tests.references import run_references


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases, and the references in the place of the kernels."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(targets_bench, "ROOM", PolygonRoom(50, 60, 1500))
    monkeypatch.setattr(targets_bench, "SLOTS", 10)
    monkeypatch.setattr(paste_bench, "DETECTIONS", 3)
    run_references(monkeypatch, mask_targets.MASK_TARGETS, paste.PASTE)


def test_mask_targets_move_the_masks_and_the_outlines_of_those_that_have_one() -> None:
    (entry,) = targets_bench.entries()
    (forward,) = entry.build(2, torch.bfloat16)
    assert forward.bytes == 20 * (28 * 28 + 8 + 32) + 8 * (0.4 * 20 * 30)
    assert forward.run().shape == (20, 28, 28)


def test_both_passes_of_the_paste_read_the_probabilities() -> None:
    (entry,) = paste_bench.entries()
    count, write = entry.build(2, torch.bfloat16)
    assert count.bytes == write.bytes == 6 * (28 * 28 * 2 + 16 + 16 + 1)
    assert (count.run() <= paste_bench.MOST_RUNS * paste_bench.WIDTH).all()
    write.run()


def test_sweeps_try_tiles_of_their_tables() -> None:
    pytest.importorskip("triton")
    for name, sweep in (targets_bench.sweeps() | paste_bench.sweeps()).items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
