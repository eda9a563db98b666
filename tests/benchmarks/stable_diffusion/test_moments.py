"""Test the preprocessing of pictures for the VAE against torchvision, and against the bicubic formula in float64."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from benchmarks.stable_diffusion.encoders import center_cropped, read_picture, resized
from tests.benchmarks.stable_diffusion.small_raw import picture

EXTENTS = [(40, 23), (23, 40), (16, 16), (16, 31), (11, 9), (97, 20), (7, 7), (19, 16)]
"""Width and height: larger, smaller and equal to the result, and with an odd rest."""


def _taps(before: int, after: int) -> np.ndarray:
    """Return the matrix of Keys' cubic with a = -3/4: four neighbours at any scale, with repeated edges."""
    a, matrix = -0.75, np.zeros((after, before))
    for position in range(after):
        at = (position + 0.5) * before / after - 0.5
        first = int(np.floor(at)) - 1
        for number in range(first, first + 4):
            x = abs(at - number)
            if x <= 1:
                weight = (a + 2) * x**3 - (a + 3) * x**2 + 1
            else:
                weight = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
            matrix[position, min(max(number, 0), before - 1)] += weight
    return matrix


@pytest.mark.parametrize(("width", "height"), EXTENTS)
def test_pictures_equal_torchvisions_without_antialiasing(width, height):
    data = picture(width, height, 3)
    theirs = transforms.Compose(
        [
            transforms.ToTensor(),
            transforms.Resize(16, InterpolationMode.BICUBIC, antialias=False),
            transforms.CenterCrop(16),
        ]
    )

    ours = read_picture(data, 16)

    assert ours.shape == (3, 16, 16)
    torch.testing.assert_close(ours, theirs(Image.open(io.BytesIO(data)).convert("RGB")), rtol=0, atol=0)


@pytest.mark.parametrize(("width", "height"), EXTENTS)
def test_resizing_equals_the_formula(width, height):
    pixels = np.array(Image.open(io.BytesIO(picture(width, height, 4)))).astype(np.float64) / 255
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    size = (16, 16 * width // height) if height <= width else (16 * height // width, 16)
    expected = np.einsum("ih,hwc,jw->cij", _taps(height, size[0]), pixels, _taps(width, size[1]))

    np.testing.assert_allclose(resized(image, 16).numpy(), expected, rtol=0, atol=1e-12)


def test_values_outside_of_0_to_1_are_not_clamped():
    edge = np.zeros((20, 20, 3), np.uint8)
    edge[:, 10:] = 255
    file = io.BytesIO()
    Image.fromarray(edge).save(file, "JPEG", quality=100)

    found = read_picture(file.getvalue(), 32)

    assert found.min() < -0.02
    assert found.max() > 1.02


@pytest.mark.parametrize(("extent", "first"), [(16, 0), (17, 0), (18, 1), (19, 2), (21, 2), (23, 4)])
def test_the_central_square_is_cropped(extent, first):
    """Halves are rounded to even: 0.5 to 0, 1.5 to 2, 2.5 to 2, 3.5 to 4."""
    line = torch.arange(extent, dtype=torch.float32)
    found = center_cropped(line.expand(3, 16, extent), 16)
    assert found[0, 0].tolist() == list(range(first, first + 16))


@pytest.mark.parametrize("data", [b"", b"no picture", picture(30, 20, 1)[:-200]], ids=["empty", "text", "cut off"])
def test_a_damaged_picture_is_an_error(data):
    with pytest.raises(ValueError, match=r"\w"):
        read_picture(data, 16)


def test_a_grey_picture_gets_three_channels():
    file = io.BytesIO()
    Image.fromarray(np.full((20, 20), 51, np.uint8)).save(file, "JPEG")
    torch.testing.assert_close(read_picture(file.getvalue(), 8), torch.full((3, 8, 8), 0.2))
