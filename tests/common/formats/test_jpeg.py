"""The size of a JPEG, and the refusal of truncated ones."""

import io

import numpy as np
import pytest
from PIL import Image

from common.formats.jpeg import jpeg_size


def encoded(height, width, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": b"x" * 3000}])
def test_width_and_height_of_a_whole_picture(options):
    assert jpeg_size(encoded(37, 91, **options)) == (91, 37)


def test_bytes_after_the_end_are_ignored():
    assert jpeg_size(encoded(16, 24) + b"trailer") == (24, 16)
    assert jpeg_size(encoded(16, 24) + bytes(10_000)) == (24, 16)


@pytest.mark.parametrize("kept", [0, 1, 20, 400, -5000, -300])
def test_a_truncated_picture_is_refused(kept):
    with pytest.raises(ValueError, match=r"(?i)truncated|cannot identify"):
        jpeg_size(encoded(120, 150)[:kept])


def test_other_formats_are_refused():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    with pytest.raises(ValueError, match="cannot identify"):
        jpeg_size(buffer.getvalue())
