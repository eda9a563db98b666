"""Test the members of samples: their bytes, reading, and errors."""

from __future__ import annotations

import io
import json
import pickle

import numpy as np
import pytest
import safetensors.numpy
import torch

from benchmarks.stable_diffusion.formats import (
    MEMBERS,
    SampleShape,
    decode_moments,
    decode_nvidia,
    decode_sample,
    encode_caption,
    encode_moments,
    encode_sample,
)
from common.errors import DataError

SHAPE = SampleShape((4, 3, 2), (5, 6))


def _moments(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE.moments).astype(np.float32)


def _captions(seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE.captions).astype(np.float32)


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_encoded_moments_equal_numpys_file():
    moments = _moments()

    content = encode_moments(moments.transpose(0, 2, 1).copy().transpose(0, 2, 1))

    assert content == _saved(moments[None])
    assert content[:8] == b"\x93NUMPY\x01\x00"
    assert len(content) == 128 + moments.size * 4


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_moments_with_other_header_padding_are_read(version):
    moments = _moments()
    file = io.BytesIO()
    np.lib.format.write_array(file, moments[None], version)
    if version == (1, 0):  # older versions of numpy padded the header to 16 bytes
        text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4, 3, 2), }"
        text += b" " * (-(10 + len(text) + 1) % 16) + b"\n"
        file = io.BytesIO(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + moments.tobytes())

    sample = decode_moments(file.getvalue(), SHAPE, "a.npy")

    assert sample.captions_TK is None
    assert sample.moments_CHW.dtype == torch.float32
    np.testing.assert_array_equal(sample.moments_CHW.numpy(), moments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_saved(_moments()[None])[:-1], r"a\.npy is cut off: 223 bytes, but float32 \(1, 4, 3, 2\) has 224"),
        (_saved(_moments()[None]) + b"\0", r"a\.npy is too long"),
        (_saved(_moments()[None])[:100], r"a\.npy is cut off"),
        (_saved(_moments()), r"a\.npy: float32 \(4, 3, 2\), expected float32 \(1, 4, 3, 2\)"),
        (_saved(_moments()[None].astype(np.float16)), r"a\.npy: float16 \(1, 4, 3, 2\)"),
        (_saved(_moments()[None].astype(">f4")), r"a\.npy: >f4"),
        (_saved(np.asfortranarray(_moments()[None])), r"a\.npy is in Fortran order"),
        (_saved(np.array([{"a": 1}], dtype=object)), r"a\.npy: object \(1,\)"),
        (b"\xff\xd8\xff\xe0", r"a\.npy is no \.npy file"),
        (b"", r"a\.npy is no \.npy file"),
        (b"\x93NUMPY\x01\x00\x04\x00{1: ", r"a\.npy is cut off, or no \.npy file"),
    ],
    ids=[
        "cut off",
        "longer",
        "cut off in the middle",
        "shape",
        "float16",
        "byte order",
        "column order",
        "objects",
        "JPEG",
        "empty",
        "header",
    ],
)
def test_invalid_moments_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        decode_moments(content, SHAPE, "a.npy")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nvidias_pickles_are_decoded(protocol):
    given = {"image_embed": _moments()[None], "captions_embed": _captions()}

    sample = decode_nvidia(pickle.dumps(given, protocol), SHAPE, "a.pyd")

    np.testing.assert_array_equal(sample.moments_CHW.numpy(), _moments())
    np.testing.assert_array_equal(sample.captions_TK.numpy(), _captions())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image_embed": _moments()[None]}, r"a\.pyd has image_embed, and captions_embed is missing"),
        ({}, r"a\.pyd has nothing, and image_embed is missing"),
        (
            {"image_embed": _moments()[None, :, :2], "captions_embed": _captions()},
            r"a\.pyd: image_embed: float32 \(1, 4, 2, 2\), expected float32 \(1, 4, 3, 2\)",
        ),
        (
            {"image_embed": _moments()[None], "captions_embed": _captions().astype(np.float16)},
            r"a\.pyd: captions_embed: float16",
        ),
    ],
)
def test_pickles_of_other_arrays_are_refused(given, message):
    with pytest.raises(DataError, match=message):
        decode_nvidia(pickle.dumps(given), SHAPE, "a.pyd")


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits of fp32 values as bfloat16: the upper half, rounded to nearest even."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_encoded_samples_are_bfloat16_safetensors():
    moments, captions = _moments(), _captions()

    content = encode_sample(torch.from_numpy(moments), torch.from_numpy(captions))

    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, array in (("moments", moments), ("captions", captions)):
        start, end = (8 + length + offset for offset in header[name]["data_offsets"])
        assert header[name]["dtype"] == "BF16"
        assert header[name]["shape"] == list(array.shape)
        assert content[start:end] == _bits(array).tobytes()
    sample = decode_sample(content, SHAPE, "a.safetensors")
    np.testing.assert_array_equal(sample.moments_CHW.view(torch.uint16).numpy(), _bits(moments))
    np.testing.assert_array_equal(sample.captions_TK.view(torch.uint16).numpy(), _bits(captions))


def _ours(**changed: np.ndarray) -> bytes:
    return safetensors.numpy.save(changed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encode_sample(torch.zeros(4, 3, 2), torch.zeros(5, 6))[:-1], r"a\.safetensors is damaged"),
        (encode_sample(torch.zeros(4, 3, 2), torch.zeros(5, 6))[:5], r"a\.safetensors is damaged"),
        (b"", r"a\.safetensors is damaged"),
        (encode_sample(torch.zeros(4, 2, 3), torch.zeros(5, 6)), r"moments: torch.bfloat16 \(4, 2, 3\), expected"),
        (encode_sample(torch.zeros(4, 3, 2), torch.zeros(6, 5)), r"captions: torch.bfloat16 \(6, 5\), expected"),
        (
            _ours(moments=_moments(), captions=_captions()),
            r"moments: torch.float32 \(4, 3, 2\), expected torch.bfloat16",
        ),
        (_ours(captions=_captions()), r"has captions, and moments are missing"),
    ],
    ids=["cut off", "first bytes", "empty", "shape of moments", "shape of captions", "type", "no moments"],
)
def test_invalid_samples_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        decode_sample(content, SHAPE, "a.safetensors")


def test_members_decode_to_their_dtype_and_captions():
    contents = {
        "npy": encode_moments(_moments()),
        "safetensors": encode_sample(torch.from_numpy(_moments()), torch.from_numpy(_captions())),
        "pyd": pickle.dumps({"image_embed": _moments()[None], "captions_embed": _captions()}),
    }
    assert set(MEMBERS) == set(contents)
    for suffix, content in contents.items():
        member = MEMBERS[suffix]
        sample = member.decode(content, SHAPE, suffix)
        assert sample.moments_CHW.dtype == member.dtype
        assert (sample.captions_TK is not None) == member.encoded


def test_captions_are_utf_8():
    assert encode_caption("ein grünes Quadrat") == b"ein gr\xc3\xbcnes Quadrat"
