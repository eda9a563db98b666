"""Triton's resize against Pillow and the reference; run by tests/test_interpreted_kernels.py. Fresh memory holds
NaN here."""

from __future__ import annotations

import pytest
import torch
from resize_oracle import MEAN, SHAPE, by_pillow, inputs

from benchmarks.maskrcnn.ops.resize import triton as resize_triton
from benchmarks.maskrcnn.ops.resize.reference import resize_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pictures_are_those_of_pillow_bit_for_bit(dtype: torch.dtype) -> None:
    found = resize_triton.resize(*inputs(), MEAN, SHAPE, dtype)
    assert torch.equal(found, by_pillow(inputs()[0]).to(dtype))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_an_odd_width_and_smaller_pictures_are_those_of_the_reference() -> None:
    pixels, before, after, mirrored = inputs()
    arguments = pixels, before, (after / 2).floor(), mirrored, MEAN, (17, 23), torch.float32
    assert torch.equal(resize_triton.resize(*arguments), resize_reference(*arguments))


def test_a_batch_without_pictures_stays_empty() -> None:
    none = [tensor[:0] for tensor in inputs()]
    assert resize_triton.resize(*none, MEAN, SHAPE, torch.float32).shape == (0, 3, *SHAPE)


def test_pixels_that_do_not_lie_behind_one_another_are_refused() -> None:
    pixels, *others = inputs()
    with pytest.raises(ValueError, match="pixels_BSS3 must be contiguous"):
        resize_triton.resize(pixels.transpose(1, 2), *others, MEAN, SHAPE, torch.float32)
