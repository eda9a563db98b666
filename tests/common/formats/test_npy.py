"""Arrays in numpy's files: those that are expected, others as they are, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.formats import npy

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (7,)])
def test_an_expected_array_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = np.random.default_rng(0).standard_normal(shape).astype(FLOAT)
    np.save(tmp_path / "a.npy", made)
    assert (tmp_path / "a.npy").stat().st_size == npy.HEADER_BYTES + made.nbytes
    found = npy.load(tmp_path / "a.npy", FLOAT, shape)
    assert found.dtype == FLOAT
    np.testing.assert_array_equal(found, made)


def test_another_array_comes_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(npy.load(tmp_path / "a.npy", FLOAT, (6,)), [[0, 1, 2], [3, 4, 5]])


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(100, FLOAT))
    content = (tmp_path / "a.npy").read_bytes()
    for size in (0, 50, 300):
        (tmp_path / "a.npy").write_bytes(content[:size])
        with pytest.raises((ValueError, EOFError)):
            npy.load(tmp_path / "a.npy", FLOAT, (100,))
