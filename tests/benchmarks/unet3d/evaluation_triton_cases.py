"""The evaluation's Triton kernels against the references; run by
tests/test_interpreted_kernels.py.

Axes: D H W voxels, K classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.ops.window_sums import triton as window_sums_triton
from benchmarks.unet3d.ops.window_sums.reference import add_window_reference, count_classes_reference
from benchmarks.unet3d.sliding_window import SlidingWindow

FORMATS = {"NCDHW": torch.contiguous_format, "NDHWC": torch.channels_last_3d}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("classes", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 5))])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16, 16), (3, 20, 50)])
def test_a_window_is_added_where_it_lies(shape, dtype, layout, classes):
    depth, height, width = shape
    sums = random(depth + 5, height + 4, width + 6, classes)
    expected = sums.clone()
    importance = SlidingWindow((32, 40, 50), 0.5, 0.0).importance()
    importance = [factor[:size] for factor, size in zip(importance, shape, strict=True)]
    logits = random(2, classes, *shape, seed=1).to(dtype).to(memory_format=FORMATS[layout])[1]
    place = (slice(2, 2 + depth), slice(1, 1 + height), slice(3, 3 + width))
    add_window_reference(expected[place], logits, importance)
    window_sums_triton.add_window(sums[place], logits, importance)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 5, 7), (17, 16, 31)])
def test_classes_are_counted(shape, classes):
    depth, height, width = shape
    sums = random(depth + 2, height + 3, width + 1, classes).round(decimals=1)  # with equal ones among them
    sums[1, 1, 0], sums[-2, -3, -2, -1] = torch.nan, torch.nan
    view = sums[1 : 1 + depth, 1 : 1 + height, :width]
    label = torch.randint(classes, shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    expected = torch.full((classes, 3), 1 << 40)
    counts = expected.clone()
    count_classes_reference(view, label, expected)
    window_sums_triton.count_classes(view, label, counts)
    assert torch.equal(counts, expected)


def test_sums_with_gaps_between_voxels_are_an_error():
    sums = torch.zeros(4, 4, 4, 3)[:, :, ::2]
    with pytest.raises(ValueError, match="W and K must be contiguous"):
        window_sums_triton.count_classes(sums, torch.zeros(4, 4, 2, dtype=torch.uint8), torch.zeros(3, 3).long())


def test_a_label_with_gaps_is_an_error():
    label = torch.zeros(4, 4, 4, dtype=torch.uint8)[:, 1:]
    with pytest.raises(ValueError, match="labels and counts must be contiguous"):
        window_sums_triton.count_classes(torch.zeros(4, 3, 4, 3), label, torch.zeros(3, 3).long())
