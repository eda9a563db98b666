"""The reference of the resize against Pillow, and against bilinear interpolation in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from benchmarks.maskrcnn.ops.resize import resize_reference
from tests.capturable import Capturable

MEAN = (102.9801, 115.9465, 122.7717)  # blue, green, red
SHAPE = (30, 46)
SLOT = 24
CASES = (
    # size before, size after, mirrored
    ((13, 19), (29, 43), False),
    ((19, 13), (28, 19), True),
    ((12, 20), (12, 33), False),  # the height stays
    ((1, 1), (5, 7), True),
    ((15, 20), (30, 40), True),  # twice: centres lie at quarters
    ((24, 24), (25, 25), False),  # the whole slot
)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noise in every slot, beside the pictures too; sizes before and after; what is mirrored."""
    random = torch.Generator().manual_seed(0)
    pixels_BSS3 = torch.randint(256, (len(CASES), SLOT, SLOT, 3), dtype=torch.uint8, generator=random)
    before, after, mirrored = zip(*CASES, strict=True)
    return (
        pixels_BSS3,
        torch.tensor(before, dtype=torch.int32),
        torch.tensor(after, dtype=torch.float32),
        torch.tensor(mirrored),
    )


def by_pillow(pixels_BSS3: Tensor) -> Tensor:
    """(B, 3, H, W) fp32: each picture resized by Pillow alone, mirrored, and padded with zeros."""
    image_B3HW = torch.zeros((len(CASES), 3, *SHAPE))
    for slot, ((height, width), (new_height, new_width), mirrored) in enumerate(CASES):
        picture = Image.fromarray(pixels_BSS3[slot, :height, :width].numpy())
        levels = np.asarray(picture.resize((new_width, new_height), Image.Resampling.BILINEAR))
        levels = levels[:, ::-1] if mirrored else levels
        for channel, level in enumerate(MEAN):
            plane = torch.from_numpy(levels[:, :, 2 - channel].astype(np.float32)) - level
            image_B3HW[slot, channel, :new_height, :new_width] = plane
    return image_B3HW


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
