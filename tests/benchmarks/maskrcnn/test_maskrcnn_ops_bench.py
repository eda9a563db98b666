"""What the benchmark of Mask R-CNN's operations on pictures and features measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.ops import resize, roi_align, selected_logits
from benchmarks.maskrcnn.ops.bench import entries, sweeps
from common.ops.bench import cases
from common.ops.bench.cases import Entry
from tests.references import run_references

OURS = ("resize", "roi_align", "selected_logits")
PLACES = 200 * 336 + 100 * 168 + 50 * 84 + 25 * 42
MASK_PIXELS = 128 * 28 * 28


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the reference stands in for the kernel, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(monkeypatch, resize.RESIZE, roi_align.ROI_ALIGN, selected_logits.SELECTED_LOGITS)


def of(name: str) -> list[Entry]:
    return [entry for entry in entries() if entry.name.startswith(name)]


@pytest.mark.usefixtures("without_memory")
def test_the_resize_reads_pictures_and_writes_the_padded_batch() -> None:
    assert [entry.calls for entry in of("resize")] == [1, 0]
    for entry in of("resize"):
        (forward,) = entry.build(12, torch.bfloat16)
        assert forward.bytes == 12 * (480 * 640 * 3 + 800 * 1344 * 3 * 2)
        forward.run()


@pytest.mark.usefixtures("without_memory")
def test_roi_align_moves_the_pyramid_and_both_heads_features() -> None:
    assert [entry.calls for entry in of("roi_align")] == [1, 0]
    for entry in of("roi_align"):
        forward, backward = entry.build(12, torch.bfloat16)
        assert forward.bytes == backward.bytes == 12 * 256 * 2 * (PLACES + 512 * 49 + 128 * 196)
        backward.run()


@pytest.mark.usefixtures("without_memory")
def test_selected_logits_read_what_has_an_object_and_backward_writes_all() -> None:
    for entry in of("selected_logits"):
        forward, backward = entry.build(12, torch.bfloat16)
        assert forward.bytes == 12 * (50 * 28 * 28 * 256 * 2 + MASK_PIXELS * 4)
        assert backward.bytes - forward.bytes == 12 * MASK_PIXELS * 256 * 2
        backward.run()


@pytest.mark.usefixtures("without_memory")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in sweeps().items():
        if name.startswith(OURS):
            tile = sweep.table[sweep.key]
            assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
            sweep.build(torch.bfloat16)[sweep.backward].run()
