"""Decoding of JPEG pictures, and conversion of other pictures to JPEG."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from PIL import Image

_END = b"\xff\xd9"
"""The end marker EOI (ITU-T T.81 section B.1.1.3), which never occurs in the data between markers."""
_TAIL = 4096
"""Bytes at the end of a file in which the end marker is searched, because other bytes may follow it."""
_DAMAGE = (OSError, SyntaxError, Image.DecompressionBombError)
"""Errors that Pillow raises for damaged pictures, in addition to ValueError."""
REMEDY = "check the data with 'mlperf-suite verify', and if that finds nothing, prepare them again without --trust"
"""Remedy in messages about a picture that cannot be decoded in training."""


def decode(data: bytes) -> Image.Image:
    """Return the RGB picture of a JPEG.

    Raises:
        ValueError: ``data`` is truncated or not a JPEG.
    """
    with _opened(data) as picture:
        return picture.convert("RGB")


def encode(picture: Image.Image, quality: int, subsampling: str = "4:2:0") -> bytes:
    """Return a picture as JPEG; ``subsampling`` of the chroma."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling=subsampling)
    return buffer.getvalue()


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Return width and height, px, of a complete JPEG.

    Decodes the picture only if the end marker is missing.

    Raises:
        ValueError: ``data`` is truncated or not a JPEG.
    """
    with _opened(data) as picture:
        if _END not in data[-_TAIL:]:
            picture.load()
        return picture.size


def checked_size(data: bytes, trust: bool) -> tuple[int, int]:
    """Return width and height, px, of a JPEG after decoding it completely, as the readers of training do.

    Args:
        trust: read only the size and decode nothing.

    Raises:
        ValueError: ``data`` is not a JPEG or, if decoded, truncated.
    """
    if not trust:
        return decode(data).size
    with _opened(data) as picture:
        return picture.size


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """Open a JPEG, and convert Pillow's errors within the block to ValueError."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            yield picture
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


def to_rgb_jpeg(data: bytes) -> bytes:
    """Return ``data`` if it is a grey or three-channel JPEG, otherwise the picture as RGB JPEG of quality 100.

    Raises:
        ValueError: ``data`` is neither JPEG nor PNG, or has 16 bits per channel.
    """
    try:
        if jpeg_components(data) in (1, 3):
            return data
    except ValueError:
        pass  # not a JPEG, or one with extra bytes between its segments, which decoders accept
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as picture:
            if picture.format == "JPEG" and picture.mode in ("L", "RGB"):
                return data
            if picture.mode.startswith("I"):  # Pillow would clip every value above 255
                raise ValueError("a grey picture of 16 bits per pixel, where pictures have 8 bits per channel")
            rgb = picture.convert("RGB")
    except _DAMAGE as error:
        raise ValueError(f"neither JPEG nor PNG, or damaged: {error}") from error
    return encode(rgb, 100)


def jpeg_components(data: bytes) -> int:
    """Return the number of colour components in the frame header of a JPEG (SOF, ITU-T T.81 section B.2.2).

    Raises:
        ValueError: there is no frame header.
    """
    if data[:2] != b"\xff\xd8":
        raise ValueError("no JPEG: the start marker is missing")
    at = 2
    while at + 10 <= len(data):
        if data[at] != 0xFF:
            raise ValueError(f"no JPEG marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # markers without a length
            at += 2
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return data[at + 9]
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise ValueError("JPEG without a frame header")
