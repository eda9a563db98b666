"""Arrays in ``.npy`` files: expected, other and damaged ones."""

import numpy as np
import pytest

from common.errors import DataError
from common.formats import npy

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (7,)])
def test_an_expected_array_is_read(tmp_path, shape):
    made = np.random.default_rng(0).standard_normal(shape).astype(FLOAT)
    np.save(tmp_path / "a.npy", made)
    assert (tmp_path / "a.npy").stat().st_size == npy.HEADER_BYTES + made.nbytes
    found = npy.load(tmp_path / "a.npy", FLOAT, shape)
    assert found.dtype == FLOAT
    np.testing.assert_array_equal(found, made)


def test_an_unexpected_array_is_returned(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(npy.load(tmp_path / "a.npy", FLOAT, (6,)), [[0, 1, 2], [3, 4, 5]])


def test_a_truncated_file_is_an_error(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(100, FLOAT))
    content = (tmp_path / "a.npy").read_bytes()
    for size in (0, 50, 300):
        (tmp_path / "a.npy").write_bytes(content[:size])
        with pytest.raises((ValueError, EOFError)):
            npy.load(tmp_path / "a.npy", FLOAT, (100,))


@pytest.mark.parametrize("fortran_order", [False, True])
def test_a_header_equals_that_of_numpy(tmp_path, fortran_order):
    made = np.arange(12, dtype=np.int16).reshape(3, 4)
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(made) if fortran_order else made)
    header = npy.read_header(path)
    mapped = np.load(path, mmap_mode="r")
    assert header == npy.Header(made.dtype, (3, 4), fortran_order, mapped.offset)


@pytest.mark.parametrize("fortran_order", [False, True])
def test_the_content_of_a_file_is_viewed(tmp_path, fortran_order):
    made = np.arange(12, dtype=np.int16).reshape(3, 4)
    np.save(tmp_path / "a.npy", np.asfortranarray(made) if fortran_order else made)
    content = bytearray((tmp_path / "a.npy").read_bytes())
    found = npy.viewed(memoryview(content))
    np.testing.assert_array_equal(found, made)
    content[-24:] = bytes(24)
    assert not found.any()  # a view, not a copy


@pytest.mark.parametrize("more", [-1, 1])
def test_content_of_another_size_is_refused(tmp_path, more):
    np.save(tmp_path / "a.npy", np.zeros(100, FLOAT))
    content = (tmp_path / "a.npy").read_bytes() + bytes(1)
    with pytest.raises(ValueError, match=r"takes 528 bytes, it has 52[79]"):
        npy.viewed(memoryview(content[: 528 + more]))


def test_content_of_objects_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([None]))
    content = (tmp_path / "a.npy").read_bytes()
    with pytest.raises(ValueError, match="OBJECT"):
        npy.viewed(memoryview(content[: npy.HEADER_BYTES] + bytes(8)))


def test_a_header_of_the_second_format_is_read(tmp_path):
    made = np.zeros((2, 3), FLOAT)
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, made, version=(2, 0))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert npy.read_header(tmp_path / "a.npy") == npy.Header(FLOAT, (2, 3), False, mapped.offset)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x93NUM", b"\x93NUMPY\x01\x00\x76\x00{'descr", b"no header" * 20],
    ids=["empty", "part of the magic", "part of the header", "text"],
)
def test_a_file_without_a_header_is_an_error(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"magic|EOF"):
        npy.read_header(tmp_path / "a.npy")


def test_a_header_of_an_unknown_format_is_an_error(tmp_path):
    with pytest.warns(UserWarning, match="NumPy"):
        np.save(tmp_path / "a.npy", np.zeros(1, [("\u03b1", "<f4")]))
    with pytest.raises(ValueError, match=r"format 3\.0"):
        npy.read_header(tmp_path / "a.npy")


def test_a_required_array_has_its_dtype_and_shape(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3, dtype=FLOAT))
    assert npy.required(tmp_path / "a.npy", FLOAT, (3,), "make it").tolist() == [0, 1, 2]
    for dtype, shape in ((FLOAT, (4,)), (np.dtype(np.int64), (3,))):
        with pytest.raises(DataError, match=r"a\.npy: float32 \(3,\), expected .*; make it"):
            npy.required(tmp_path / "a.npy", dtype, shape, "make it")
    with pytest.raises(DataError, match=r"b\.npy cannot be read: .*; make it"):
        npy.required(tmp_path / "b.npy", FLOAT, (3,), "make it")
