"""Pickled arrays are read without executing code in them."""

import pickle

import numpy as np
import pytest

from common.errors import DataError
from common.untrusted.pickled_arrays import load_arrays, load_values
from tests.common.untrusted.hostile import Call
from tests.common.untrusted.python2_pickles import python2_pickle


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", ">f4", "<i8", "|u1", "|b1"])
def test_arrays_are_read(protocol, dtype):
    values = np.arange(24).reshape(2, 3, 4)
    given = {"C": values.astype(dtype), "F": np.asfortranarray(values.astype(dtype)), "empty": np.zeros((0, 3), dtype)}

    found = load_arrays(pickle.dumps(given, protocol))

    assert list(found) == list(given)
    for name, array in given.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_names_of_older_numpy_are_read(protocol):
    pickled = pickle.dumps({"a": np.arange(3, dtype=np.float32)}, protocol)
    if protocol == 2:
        pickled = pickled.replace(b"numpy._core", b"numpy.core")
    else:  # names have their length before them, frames theirs
        frame = pickled.index(b"\x95")
        pickled = pickled[:frame] + pickled[frame + 9 :]
        newer = next(name for name in (b"numpy._core.multiarray", b"numpy._core.numeric") if name in pickled)
        older = newer.replace(b"_core", b"core")
        pickled = pickled.replace(bytes([len(newer)]) + newer, bytes([len(older)]) + older)
    assert b"numpy.core" in pickled

    assert load_arrays(pickled)["a"].tolist() == [0, 1, 2]


def test_arrays_pickled_by_python_2_are_read():
    """The arrays have all values of a byte, which Python 2 wrote as texts."""
    given = {"w": np.arange(256, dtype=np.uint8).view("<f4").reshape(4, 16), "b": np.arange(3, dtype=">f8")}

    found = load_arrays(python2_pickle(given))

    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in given.items()}
    assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
        name: (array.dtype, array.shape) for name, array in given.items()
    }


@pytest.mark.parametrize("inside", [None, "blobs"])
def test_a_dict_within_the_dict_is_read_where_one_is_named(inside):
    nested = pickle.dumps({"blobs": {"w": np.ones(2)}, "cfg": "a text"}, 2)
    if inside is None:
        with pytest.raises(DataError, match="a dict under 'blobs'"):
            load_arrays(nested)
    else:
        assert load_arrays(nested, inside=inside)["w"].tolist() == [1, 1]
    assert load_arrays(pickle.dumps({"w": np.ones(2)}), inside=inside)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "attack",
    [
        lambda path: Call(eval, f"open({str(path)!r}, 'w')"),
        lambda path: {"image_embed": Call(open, str(path), "w")},
        lambda path: {"image_embed": Call(np.fromfile, str(path))},
        lambda path: {"image_embed": Call(getattr, np.ndarray, "tofile")},
    ],
    ids=["eval", "open", "numpy's own", "getattr"],
)
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, attack, protocol):
    mark = tmp_path / "ran"

    with pytest.raises(DataError, match=r"^000000012\.pyd: its pickle asks for .*no use for"):
        load_arrays(pickle.dumps(attack(mark), protocol), "000000012.pyd")

    assert not mark.exists()


def test_the_same_pickle_runs_code_in_python(tmp_path):
    """So the test before does test something."""
    mark = tmp_path / "ran"

    pickle.loads(pickle.dumps(Call(open, str(mark), "w"))).close()

    assert mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        {"a": np.array(["text"])},
        {"a": np.array([1, "x"], object)},
        {"a": np.array([1j])},
        {"a": np.zeros(2, [("x", "f4")])},
    ],
)
def test_other_dtypes_are_refused(value):
    with pytest.raises(DataError, match=r"array of dtype .*, where numbers are expected"):
        load_arrays(pickle.dumps(value, 4))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([np.ones(2)], "holds no dict of arrays, but a list"),
        (np.ones(2), "holds no dict of arrays, but a array"),
        ({"a": [1.0]}, "a list under 'a', where an array"),
        ({3: np.ones(2)}, "a array under 3, where an array with a name"),
    ],
)
def test_only_dicts_of_arrays_are_read(value, message):
    with pytest.raises(DataError, match=message):
        load_arrays(pickle.dumps(value, 4))


def test_cut_and_lengthened_pickles_are_damage():
    pickled = pickle.dumps({"a": np.arange(100)}, 4)
    for end in (0, 1, 40, len(pickled) - 1):
        with pytest.raises(DataError, match="damaged"):
            load_arrays(pickled[:end])
    with pytest.raises(DataError, match="goes on"):
        load_arrays(pickled + b"more")


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04cnumpy\nndarray\n}b.",  # a state for the name of a class
        b"\x80\x04c_codecs\nencode\nN}\x8c\x0c__defaults__K\x01s\x86b.",  # an attribute for a function
        b"\x80\x04c_codecs\nencode\n\x8c\x01a\x8c\x05rot13\x86R.",
        b"\x80\x04K\x01K\x02R.",  # the call of a number
        b"\x80\x04Ptoken\n.",  # a persistent name
        b"\x80\x04\x82\x01.",  # an extension's code
    ],
    ids=[
        "state of a class",
        "attribute of a function",
        "other codec",
        "call of a number",
        "persistent name",
        "extension",
    ],
)
def test_broken_pickles_are_damage(pickled):
    with pytest.raises(DataError):
        load_arrays(pickled)


@pytest.mark.parametrize(
    "state",
    [
        (1, (4,), "dtype", False, b"\0" * 8),  # too few bytes
        (1, (-1,), "dtype", False, b""),
        (1, (2,), 7, False, b"\0" * 8),
    ],
)
def test_a_garbled_state_of_an_array_is_damage(state):
    class Garbled:
        def __reduce__(self):
            function, arguments, _ = np.arange(2, dtype=np.int32).__reduce__()
            dtype = np.dtype(np.int32) if state[2] == "dtype" else state[2]
            return function, arguments, (*state[:2], dtype, *state[3:])

    with pytest.raises(DataError, match="damaged"):
        load_arrays(pickle.dumps({"a": Garbled()}, 4))


def test_a_dict_of_plain_values_is_read():
    value = {"1abc": {"resolution": None, "date": "2020-01-01", "atoms": (b"bytes", (2, 37)), "chains": ["A"], 1: 2.5}}
    assert load_values(pickle.dumps(value, 4)) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Call(print, "x"), "asks for builtins.print"),
        (np.zeros(2), r"asks for numpy\._core\.\w+\._(reconstruct|frombuffer)"),
        ([1], "holds no dict, but a list"),
    ],
    ids=["call", "array", "list"],
)
def test_anything_but_plain_values_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        load_values(pickle.dumps(value, 4), "dicts/ab")


def test_bytes_behind_a_pickle_of_plain_values_are_an_error():
    with pytest.raises(DataError, match=r"^dicts/ab goes on behind the end of its pickle"):
        load_values(pickle.dumps({"a": "b"}, 4) + b"\0", "dicts/ab")


def test_a_cut_pickle_of_plain_values_is_damage():
    with pytest.raises(DataError, match=r"^dicts/ab is damaged"):
        load_values(pickle.dumps({"a": "b"})[:-3], "dicts/ab")
