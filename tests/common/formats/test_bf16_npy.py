"""Arrays in bf16, stored as a ``.npy`` of their bits."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from common.errors import DataError
from common.formats import bf16_npy


def test_numpy_reads_the_bits():
    values = torch.linspace(-3, 3, 60).to(torch.bfloat16).reshape(3, 20)
    for array in (values, values.T, values[:, ::2], values[0]):
        content = bf16_npy.encode(array)
        bits = np.load(io.BytesIO(content))
        assert bits.dtype == np.uint16
        assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), array)
        offset = bf16_npy.values_offset(content + b"rest", len(content), tuple(array.shape), "array")
        assert content[offset:] == bits.tobytes()


def test_headers_of_other_programs_are_read():
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6, dtype=np.uint16).reshape(2, 3), version=(2, 0))
    content = file.getvalue()
    offset = bf16_npy.values_offset(content, len(content), (2, 3), "array")
    assert np.array_equal(np.frombuffer(content[offset:], np.uint16), np.arange(6))


@pytest.mark.parametrize(
    ("array", "cut", "message"),
    [
        (np.zeros((2, 3), np.int16), 0, r"array: int16 \(2, 3\), expected uint16 \(2, 3\)"),
        (np.zeros((3, 2), np.uint16), 0, r"array: uint16 \(3, 2\), expected uint16 \(2, 3\)"),
        (np.asfortranarray(np.zeros((2, 3), np.uint16)), 0, "in C order"),
        (np.zeros((2, 3), np.uint16), 1, "array has 139 bytes, but uint16 .* takes 140"),
        (np.zeros((2, 3), np.uint16), 100, "array is no .npy"),
    ],
)
def test_other_arrays_are_refused(array, cut, message):
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()[: len(file.getvalue()) - cut]
    with pytest.raises(DataError, match=message):
        bf16_npy.values_offset(content, len(content), (2, 3), "array")
