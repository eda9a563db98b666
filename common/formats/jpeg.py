"""JPEG: pictures that are decoded as they are stored, and other pictures made into JPEG."""

from __future__ import annotations

import io

from PIL import Image

_END = b"\xff\xd9"
"""The marker EOI (ITU-T T.81 section B.1.1.3), which data between markers never contain."""
_TAIL = 4096
"""Bytes at the end, some of which may be none of the picture's."""
_DAMAGE = (OSError, SyntaxError, Image.DecompressionBombError)
"""Errors that Pillow raises for damaged pictures, beside ValueError."""
REMEDY = "check the data with 'mlperf-suite verify', and if that finds nothing, prepare them again without --trust"
"""For messages of training about a picture that cannot be decoded."""


def decode(data: bytes) -> Image.Image:
    """JPEG to an RGB picture.

    Raises:
        ValueError: ``data`` is truncated or no JPEG.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            return picture.convert("RGB")
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Width and height, px, of a JPEG that is whole.

    Only what does not end as JPEGs do is decoded to find out.

    Raises:
        ValueError: ``data`` is truncated or no JPEG.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            if _END not in data[-_TAIL:]:
                picture.load()
            return picture.size
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


def checked_size(data: bytes, trust: bool) -> tuple[int, int]:
    """Width and height, px, of a JPEG that is decoded completely, as the readers of training decode it.

    Args:
        data: the JPEG.
        trust: read the size alone and decode nothing.

    Raises:
        ValueError: ``data`` is no JPEG or, where it is decoded, truncated.
    """
    if not trust:
        return decode(data).size
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            return picture.size
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


def to_rgb_jpeg(data: bytes) -> bytes:
    """``data`` itself when it is a grey or three-channel JPEG, otherwise the picture as RGB JPEG of quality 100.

    Raises:
        ValueError: ``data`` is neither JPEG nor PNG, or has 16 bits per channel.
    """
    try:
        if jpeg_components(data) in (1, 3):
            return data
    except ValueError:
        pass  # no JPEG, or one with stray bytes between its segments, which decoders tolerate
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as picture:
            if picture.format == "JPEG" and picture.mode in ("L", "RGB"):
                return data
            if picture.mode.startswith("I"):  # Pillow would cut off every value above 255
                raise ValueError("a grey picture of 16 bits per pixel, where pictures have 8 bits per channel")
            rgb = picture.convert("RGB")
    except _DAMAGE as error:
        raise ValueError(f"neither JPEG nor PNG, or damaged: {error}") from error
    buffer = io.BytesIO()
    rgb.save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


def jpeg_components(data: bytes) -> int:
    """Colour components of a JPEG as its frame header (SOF, ITU-T T.81 section B.2.2) says.

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
