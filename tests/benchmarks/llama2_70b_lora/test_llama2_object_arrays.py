"""numpy's object arrays, read without running what they say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.llama2_70b_lora.preparation.published import read_object_array
from common.errors import DataError
from tests.common.untrusted.hostile import Call


def saved(path, *objects):
    array = np.empty(len(objects), object)
    array[:] = objects
    np.save(path, array, allow_pickle=True)
    return path


def test_arrays_of_all_integers_and_lists_come_back(tmp_path):
    dtypes = [np.int32, np.int64, np.uint8, np.int8, np.uint16, np.bool_, np.dtype(">i4")]
    given = [{"ids": np.arange(5).astype(dtype), "mask": [0, 1, 1], "start": [0]} for dtype in dtypes]

    found = read_object_array(saved(tmp_path / "a.npy", *given))

    assert len(found) == len(given)
    for one, other in zip(found, given, strict=True):
        assert one["mask"] == [0, 1, 1]
        assert one["ids"].dtype == other["ids"].dtype
        np.testing.assert_array_equal(one["ids"], other["ids"])


def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    file = saved(tmp_path / "train.npy", {"input_ids": Call(open, str(mark), "w")})

    with pytest.raises(DataError, match=r"train\.npy: its pickle asks for .*no use for"):
        read_object_array(file)

    assert not mark.exists()


def test_an_array_of_floats_is_refused(tmp_path):
    with pytest.raises(DataError, match="array of dtype 'f4', where integers are expected"):
        read_object_array(saved(tmp_path / "a.npy", {"ids": np.ones(3, np.float32)}))


def test_a_cut_off_file_is_damaged(tmp_path):
    file = saved(tmp_path / "a.npy", {"ids": np.arange(100)})
    file.write_bytes(file.read_bytes()[:-50])

    with pytest.raises(DataError, match="damaged"):
        read_object_array(file)


def test_an_array_of_numbers_is_no_object_array(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))

    with pytest.raises(DataError, match="of int64, not of objects"):
        read_object_array(tmp_path / "a.npy")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.npy cannot be read"):
        read_object_array(tmp_path / "a.npy")
