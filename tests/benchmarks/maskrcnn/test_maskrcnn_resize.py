"""The reference of the resize against Pillow, and against bilinear interpolation in float64."""

import numpy as np
import pytest
import torch
from PIL import Image
from resize_oracle import CASES, MEAN, SHAPE, by_pillow, inputs
from torch.nn import functional as F

from benchmarks.maskrcnn.ops.resize.reference import resize_reference
from tests.capturable import Capturable


def test_enlarged_pictures_are_those_of_pillow_bit_for_bit():
    found = resize_reference(*inputs(), MEAN, SHAPE, torch.float32)
    assert torch.equal(found, by_pillow(inputs()[0]))
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("before", "after"), [((480, 640), (800, 1066)), ((640, 427), (1199, 800))])
def test_pictures_of_cocos_size_are_those_of_pillow_bit_for_bit(before, after):
    pixels = torch.randint(256, (1, 640, 640, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([before], dtype=torch.int32), torch.tensor([after], dtype=torch.float32), torch.tensor([False])
    found = resize_reference(pixels, *sizes, (0.0, 0.0, 0.0), after, torch.float32)
    picture = Image.fromarray(pixels[0, : before[0], : before[1]].numpy())
    expected = torch.from_numpy(np.array(picture.resize(after[::-1], Image.Resampling.BILINEAR)))
    assert torch.equal(found[0].permute(1, 2, 0).flip(2), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    found = resize_reference(*inputs(), MEAN, SHAPE, dtype)
    assert torch.equal(found, by_pillow(inputs()[0]).to(dtype))


def test_levels_are_the_interpolated_ones_but_for_rounding():
    """Pillow rounds twice, along the width and along the height: within one level of what is not rounded."""
    pixels, before, after, mirrored = inputs()
    found = resize_reference(pixels, before, after, torch.zeros_like(mirrored), (0.0, 0.0, 0.0), SHAPE, torch.float64)
    for slot, ((height, width), size, _) in enumerate(CASES):
        picture = pixels[slot, :height, :width].permute(2, 0, 1).double().flip(0)
        exact = F.interpolate(picture[None], size, mode="bilinear", align_corners=False)[0]
        assert (found[slot, :, : size[0], : size[1]] - exact).abs().max() <= 1.0


def test_smaller_pictures_are_interpolated_without_a_wider_filter():
    """One pixel of three is taken as it is: its centre is where the new pixel's is."""
    pixels = torch.arange(9 * 9 * 3, dtype=torch.uint8).view(1, 9, 9, 3)
    sizes = torch.tensor([[9, 9]], dtype=torch.int32), torch.tensor([[3.0, 3.0]]), torch.tensor([False])
    found = resize_reference(pixels, *sizes, (0.0, 0.0, 0.0), (3, 3), torch.float32)
    assert torch.equal(found[0].permute(1, 2, 0).flip(2), pixels[0, 1::3, 1::3].float())


def test_a_batch_without_pictures_stays_empty():
    none = [tensor[:0] for tensor in inputs()]
    assert resize_reference(*none, MEAN, SHAPE, torch.float32).shape == (0, 3, *SHAPE)


def test_a_graph_can_hold_it():
    tensors = inputs()
    with Capturable():
        resize_reference(*tensors, MEAN, SHAPE, torch.float32)
