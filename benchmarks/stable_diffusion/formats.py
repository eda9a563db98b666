"""Formats of the members of a sample in a tar: the moments of a picture, with or without its encoded caption.

- ``KEY.npy``: moments, float32 (1, 2C, H, W) in C order, as the reference's script writes them;
- ``KEY.pyd``: a pickled dict of ``image_embed``, the same moments, and ``captions_embed``, float32 (T, K), as in
  NVIDIA's submissions since round v4.0; we read this format and never write it;
- ``KEY.safetensors``: ``moments`` (2C, H, W) and ``captions`` (T, K), bfloat16: half the size of ``.pyd``;
- ``KEY.txt``: the caption in UTF-8.

Legend: C channels of a latent (moments have 2C), H its height, W its width, T tokens of a caption, K features of a
token.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from common.errors import DataError
from common.untrusted.array_file import HEADER_BYTES as NPY_HEADER_BYTES
from common.untrusted.array_file import MAGIC, parse_header
from common.untrusted.pickled_arrays import load_arrays

CAPTION = "txt"
"""Suffix of the caption, which every sample has."""
MOMENTS, ENCODED, NVIDIA_ENCODED = "npy", "safetensors", "pyd"
"""Suffixes of the picture's member, of which every sample has one."""
SUFFIXES = (MOMENTS, ENCODED, NVIDIA_ENCODED)
IMAGE, CAPTIONS = "image_embed", "captions_embed"
"""Keys of NVIDIA's dicts."""

_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True)
class SampleShape:
    """Expected shapes of a sample.

    Attributes:
        moments: (2C, H, W).
        captions: (T, K).
    """

    moments: tuple[int, int, int]
    captions: tuple[int, int]


@dataclass(frozen=True)
class DecodedSample:
    """The decoded content of a picture's member, in the dtype of the member. The tensors own their memory.

    Attributes:
        moments_CHW: means, then log-variances, along the channels.
        captions_TK: the encoded caption; None if the member has none.
    """

    moments_CHW: Tensor
    captions_TK: Tensor | None


@dataclass(frozen=True)
class Member:
    """A kind of picture member.

    Attributes:
        encoded: whether it includes the encoded caption.
        decode: function of the content, the expected shape, and the name for messages.
    """

    dtype: torch.dtype
    encoded: bool
    decode: Callable[[bytes, SampleShape, str], DecodedSample]


def encode_moments(moments_CHW: NDArray[np.float32]) -> bytes:
    """Return a ``.npy`` of float32 (2C, H, W), with the leading axis of size 1 that the format requires."""
    content = np.ascontiguousarray(moments_CHW, _FLOAT32)
    return _moments_header((1, *moments_CHW.shape)) + content.tobytes()


def decode_moments(content: bytes, shape: SampleShape, name: str) -> DecodedSample:
    """Decode a ``.npy`` from :func:`encode_moments` or ``numpy.save``; messages contain ``name``.

    Raises:
        DataError: the content is truncated or damaged, or has another dtype, shape or memory order.
    """
    expected = (1, *shape.moments)
    header = _moments_header(expected)
    offset = len(header) if content.startswith(header) else _parsed_header(content, expected, name)
    values = math.prod(expected)
    end = offset + values * _FLOAT32.itemsize
    if len(content) != end:
        what = "is cut off" if len(content) < end else "is too long"
        raise DataError(f"{name} {what}: {len(content)} bytes, but float32 {expected} has {end}")
    return DecodedSample(_owned(np.frombuffer(content, _FLOAT32, values, offset), shape.moments), None)


def decode_nvidia(content: bytes, shape: SampleShape, name: str) -> DecodedSample:
    """Decode NVIDIA's pickle of moments and encoded caption, without executing anything that the pickle requests.

    Raises:
        DataError: the pickle is damaged or contains more than arrays, or an array is missing or has a wrong dtype or
            shape.
    """
    arrays = load_arrays(content, name)
    tensors = []
    for key, expected in ((IMAGE, (1, *shape.moments)), (CAPTIONS, shape.captions)):
        if key not in arrays:
            raise DataError(f"{name} has {', '.join(sorted(arrays)) or 'nothing'}, and {key} is missing")
        array = arrays[key]
        _compare(f"{name}: {key}", array.dtype, array.shape, _FLOAT32, expected)
        tensors.append(_owned(array, expected[-3:]))
    return DecodedSample(*tensors)


def encode_sample(moments_CHW: Tensor, captions_TK: Tensor) -> bytes:
    """Return a ``.safetensors`` of (2C, H, W) and (T, K), rounded to bfloat16."""
    tensors = {"moments": moments_CHW, "captions": captions_TK}
    rounded = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    return bytes(safetensors.torch.save(rounded))


def decode_sample(content: bytes, shape: SampleShape, name: str) -> DecodedSample:
    """Decode a ``.safetensors`` from :func:`encode_sample`.

    Raises:
        DataError: the content is truncated or damaged, or a tensor is missing or has a wrong dtype or shape.
    """
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{name} is damaged, or no safetensors file: {type(error).__name__}: {error}") from error
    for key, expected in (("moments", shape.moments), ("captions", shape.captions)):
        if key not in tensors:
            raise DataError(f"{name} has {', '.join(sorted(tensors)) or 'nothing'}, and {key} are missing")
        found = tensors[key]
        _compare(f"{name}: {key}", found.dtype, tuple(found.shape), torch.bfloat16, expected)
    return DecodedSample(tensors["moments"], tensors["captions"])


def encode_caption(caption: str) -> bytes:
    """Return the content of a ``.txt``."""
    return caption.encode("utf-8")


MEMBERS = {
    MOMENTS: Member(torch.float32, False, decode_moments),
    ENCODED: Member(torch.bfloat16, True, decode_sample),
    NVIDIA_ENCODED: Member(torch.float32, True, decode_nvidia),
}
"""Kinds of picture members by suffix."""


@lru_cache
def _moments_header(shape: tuple[int, ...]) -> bytes:
    """Return the header that ``numpy.save`` writes for float32 of ``shape``."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": _FLOAT32.str, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _parsed_header(content: bytes, expected: tuple[int, ...], name: str) -> int:
    """Return the size of a valid header in bytes, for headers that differ from that of our numpy version."""
    if not content.startswith(MAGIC):
        raise DataError(f"{name} is no .npy file: it begins with {bytes(content[: len(MAGIC)])!r}")
    try:
        header = parse_header(io.BytesIO(content[: 2 * NPY_HEADER_BYTES]))
    except ValueError as error:
        raise DataError(f"{name} is cut off, or no .npy file: {error}") from error
    _compare(name, header.dtype, header.shape, _FLOAT32, expected)
    if header.fortran_order:
        raise DataError(f"{name} is in Fortran order, expected C order")
    return header.offset


def _compare(name: str, dtype: object, shape: tuple[int, ...], wanted: object, expected: tuple[int, ...]) -> None:
    if dtype != wanted or shape != expected:
        raise DataError(f"{name}: {dtype} {shape}, expected {wanted} {expected}: it is another data set")


def _owned(array: NDArray[np.float32], shape: tuple[int, ...]) -> Tensor:
    """Return a tensor with a copy of the values."""
    return torch.from_numpy(array.reshape(shape).copy())
