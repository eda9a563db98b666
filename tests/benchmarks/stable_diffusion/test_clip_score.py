"""Test the CLIP score's preprocessing against Pillow and torchvision, and its cosines."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from benchmarks.stable_diffusion.clip_score import DEVIATION, MEAN, ClipTransform, cosines, resize_bicubic, to_bytes


def pictures(count, height, width, seed=0):
    """Return noise; the first picture is black and white, which overshoots most."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
    noise[0] = 255 * (noise[0] > 127)
    return noise


def as_image(picture_3HW):
    return Image.fromarray(picture_3HW.permute(1, 2, 0).contiguous().numpy())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((512, 512), (224, 224)),
        ((512, 512), (299, 299)),
        ((96, 64), (48, 32)),
        ((32, 32), (16, 16)),
        ((33, 17), (66, 34)),
        ((16, 16), (75, 75)),
        ((40, 40), (39, 40)),
        ((40, 40), (40, 13)),
        ((1, 1), (4, 4)),
        ((9, 9), (9, 9)),
    ],
    ids=str,
)
def test_resized_bytes_equal_pillows(before, after):
    given = pictures(2, *before)
    found = resize_bicubic(given, *after)
    for picture, resized in zip(given, found, strict=True):
        expected = np.asarray(as_image(picture).resize((after[1], after[0]), Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(resized.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(("height", "width"), [(512, 512), (64, 64), (90, 60), (60, 91)])
@pytest.mark.parametrize("resolution", [224, 32])
def test_the_transform_equals_openclips(height, width, resolution):
    """OpenCLIP's evaluation transform consists of torchvision's transforms of a Pillow image."""
    expected = transforms.Compose(
        [
            transforms.Resize(resolution, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(resolution),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    given = pictures(2, height, width)
    found = ClipTransform(resolution, torch.float32)(given)
    torch.testing.assert_close(found, torch.stack([expected(as_image(p)) for p in given]), rtol=0, atol=5e-7)


def test_the_transform_returns_the_requested_dtype():
    transform = ClipTransform(8, torch.bfloat16)
    found = transform(pictures(1, 16, 16))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, ClipTransform(8, torch.float32)(pictures(1, 16, 16)).bfloat16())


def test_bytes_are_truncated_and_not_rounded():
    values = torch.tensor([0.0, 0.999 / 255, 1.001 / 255, 0.5, 254.999 / 255, 1.0])
    assert to_bytes(values).tolist() == [0, 0, 1, 127, 254, 255]


def test_cosines_do_not_depend_on_lengths():
    a = torch.tensor([[1.0, 0, 0], [3, 4, 0], [1, 1, 0], [-2, 0, 0]])
    b = torch.tensor([[5.0, 0, 0], [3, 4, 0], [1, -1, 0], [1, 0, 0]])
    torch.testing.assert_close(cosines(a, b), torch.tensor([1.0, 1.0, 0.0, -1.0]))


def test_cosines_of_half_precision_are_computed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, 64, generator=generator).half() for _ in range(2))
    found = cosines(a, b)
    expected = (a.double() * b.double()).sum(1) / (a.double().norm(dim=1) * b.double().norm(dim=1))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
