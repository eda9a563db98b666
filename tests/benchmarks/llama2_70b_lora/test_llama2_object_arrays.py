"""numpy's object arrays, read without running what they say."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest

from benchmarks.llama2_70b_lora.preparation.published import read_object_array
from common.errors import DataError
from tests.common.untrusted.hostile import Call


def npy(pickled: bytes, count: int = 1) -> bytes:
    """An object array's file with this pickle."""
    file = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + pickled


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


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("core", [b"numpy.core.multiarray", b"numpy._core.multiarray"], ids=["older", "newer"])
def test_files_of_older_and_newer_numpy_are_read(tmp_path, protocol, core):
    array = np.empty(1, object)
    array[0] = {"ids": np.array([3, 4], np.int32)}
    pickled = pickle.dumps(array, protocol)
    there = next(name for name in (b"numpy._core.multiarray", b"numpy.core.multiarray") if name in pickled)
    if protocol == 4:  # names have their length before them, frames theirs
        frame = pickled.index(b"\x95")
        pickled = pickled[:frame] + pickled[frame + 9 :]
        pickled = pickled.replace(bytes([len(there)]) + there, bytes([len(core)]) + core)
    else:
        pickled = pickled.replace(there, core)
    (tmp_path / "a.npy").write_bytes(npy(pickled))

    assert read_object_array(tmp_path / "a.npy")[0]["ids"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "attack",
    [
        lambda path: Call(eval, f"open({str(path)!r}, 'w')"),
        lambda path: {"input_ids": Call(open, str(path), "w")},
        lambda path: {"input_ids": Call(np.fromfile, str(path))},
        lambda path: {"input_ids": Call(getattr, np.ndarray, "tofile")},
    ],
    ids=["eval", "open", "numpy's own", "getattr"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, attack, protocol):
    mark, file = tmp_path / "ran", tmp_path / "train.npy"
    array = np.empty(1, object)
    array[0] = attack(mark)
    file.write_bytes(npy(pickle.dumps(array, protocol)))

    with pytest.raises(DataError, match=r"train\.npy: its pickle asks for .*no use for"):
        read_object_array(file)

    assert not mark.exists()


def test_the_same_attack_runs_where_numpy_reads_it(tmp_path):
    """Or the test before would show nothing."""
    mark, file = tmp_path / "ran", tmp_path / "train.npy"
    array = np.empty(1, object)
    array[0] = Call(open, str(mark), "w")
    file.write_bytes(npy(pickle.dumps(array)))

    np.load(file, allow_pickle=True)[0].close()

    assert mark.exists()


def test_an_array_of_floats_is_refused(tmp_path):
    with pytest.raises(DataError, match="array of dtype 'f4', where integers are expected"):
        read_object_array(saved(tmp_path / "a.npy", {"ids": np.ones(3, np.float32)}))


@pytest.mark.parametrize(
    "state",
    [
        (1, (4,), "dtype", False, b"\0" * 8),  # too few bytes
        (1, (-1,), "dtype", False, b""),
        (1, (2,), np.int32, False, b"\0" * 8),  # a class for a dtype: refused by its name
        (1, (2,), 7, False, b"\0" * 8),
    ],
)
def test_a_garbled_state_of_an_array_is_damage(tmp_path, state):
    class Garbled:
        def __reduce__(self):
            function, arguments, _ = np.arange(2, dtype=np.int32).__reduce__()
            dtype = np.dtype(np.int32) if state[2] == "dtype" else state[2]
            return function, arguments, (*state[:2], dtype, *state[3:])

    file = tmp_path / "a.npy"
    array = np.empty(1, object)
    array[0] = {"ids": Garbled()}
    file.write_bytes(npy(pickle.dumps(array)))

    with pytest.raises(DataError, match=r"a\.npy"):
        read_object_array(file)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04cnumpy\nndarray\n}b.",  # a state for the name of a class
        b"\x80\x04cnumpy\ndtype\n}\x8c\x01ak\x01sb.",
        b"\x80\x04K\x01K\x02R.",  # the call of a number
        b"\x80\x04Ptoken\n.",  # a persistent name
        b"\x80\x04\x82\x01.",  # an extension's code
        b"\x80\x04",
        b"",
    ],
    ids=["state of a class", "state of a type", "call of a number", "persistent name", "extension", "no end", "empty"],
)
def test_broken_pickles_are_damage(tmp_path, pickled):
    file = tmp_path / "a.npy"
    file.write_bytes(npy(pickled))

    with pytest.raises(DataError, match=r"a\.npy"):
        read_object_array(file)


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
