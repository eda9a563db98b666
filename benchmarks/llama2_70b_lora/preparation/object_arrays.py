"""Object arrays in numpy's files, read without running what they say.

``numpy.save`` writes an array of objects as a pickle, and unpickling calls whatever functions the pickle names. Here
names are looked up in a table of two, numpy's arrays and their dtypes, and even these are not numpy's own but records
that take the state of a pickled array apart, check it and make the array of its bytes. Beside them a pickle can make
only what the format has opcodes for: numbers, texts, bytes, lists, tuples, dicts and sets.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError

_INTEGERS = ("b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)))
"""What arrays may be of: truth values and integers."""
_ARRAY, _DTYPE, _RECONSTRUCT = "ndarray", "dtype", "_reconstruct"
_ADMITTED = {("numpy", _ARRAY): _ARRAY, ("numpy", _DTYPE): _DTYPE}
_ADMITTED |= {(f"numpy.{core}.multiarray", _RECONSTRUCT): _RECONSTRUCT for core in ("core", "_core")}


def read_object_array(path: Path) -> list[Any]:
    """The objects of the 1-D object array in the ``.npy`` file ``path``; arrays among them are numpy's.

    Raises:
        DataError: the file is missing, cut off or damaged, holds no such array, or its pickle asks for anything but
            arrays of integers, dicts and lists. Nothing of what it asks for has then been done.
    """
    try:
        with open(path, "rb") as file:
            shape = _read_npy_header(file)
            content = _finished(_ArrayUnpickler(file).load())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except _Refused as error:
        raise DataError(f"{path}: {error}; do not use this file, and ask where it comes from") from error
    except _DAMAGE as error:
        raise DataError(f"{path} is damaged, or no object array: {type(error).__name__}: {error}") from error
    if not isinstance(content, list) or len(shape) != 1 or len(content) != shape[0]:
        raise DataError(f"{path} holds no one-dimensional array of objects; its header says {list(shape)}")
    return content


_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
)
"""What unpickling damaged bytes may raise."""


class _Refused(Exception):
    """The pickle asks for more than data."""


class _Dtype:
    """A pickled dtype: ``dtype(text, align, copy)``, and then its state, of which the byte order matters."""

    __slots__ = ("name", "order")

    def __init__(self, name: str, align: bool, copy: bool) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise ValueError(f"byte order {state[1]!r}")
        self.order = state[1]

    def numpy(self) -> np.dtype[Any] | None:
        """numpy's own; None for objects."""
        if self.name == "O8":
            return None
        if self.name not in _INTEGERS:
            raise _Refused(f"its pickle has an array of dtype {self.name!r}, where integers are expected")
        return np.dtype(f"{self.order}{self.name}")


class _Array:
    """A pickled array, empty until its state comes."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: NDArray[Any] | list[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype) or not all(type(axis) is int and axis >= 0 for axis in shape):
            raise ValueError("the state of an array is garbled")
        plain = dtype.numpy()
        if plain is None:
            if len(shape) != 1 or not isinstance(content, list) or len(content) != shape[0]:
                raise ValueError(f"{len(content)} objects for shape {shape}")
            self.values = content
            return
        if not isinstance(content, bytes) or len(content) != math.prod(shape) * plain.itemsize:
            raise ValueError(f"not the bytes of an array of shape {shape}")
        self.values = np.frombuffer(content, plain).reshape(shape, order="F" if fortran else "C")


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays as records, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """Stand in for one of numpy's names."""
        kind = _ADMITTED.get((module, name))
        if kind == _ARRAY:
            return _ArrayName()
        if kind == _DTYPE:
            return lambda name, align=False, copy=True: _Dtype(name, align, copy)
        if kind == _RECONSTRUCT:
            return lambda subtype, shape, code: _reconstruct(subtype, shape)
        raise _Refused(f"its pickle asks for {module}.{name}, which a file of arrays has no use for")


class _ArrayName:
    """What stands for the class ``numpy.ndarray``: it can be named, and nothing else."""

    __slots__ = ()


def _reconstruct(subtype: Any, shape: Any) -> _Array:
    if not isinstance(subtype, _ArrayName) or shape != (0,):
        raise ValueError("an array is made in an unknown way")
    return _Array()


def _read_npy_header(file: BinaryIO) -> tuple[int, ...]:
    """The shape of an array of objects; leaves ``file`` where the pickle begins."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of numpy's format")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype != np.dtype(object):
        raise ValueError(f"its array is of {dtype}, not of objects")
    return shape


def _finished(content: Any) -> Any:
    """``content`` with arrays in the places of their records, in lists and dicts."""
    if isinstance(content, _Array):
        content = content.values
    if isinstance(content, list):
        return [_in_dict(entry) for entry in content]
    return content


def _in_dict(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {key: value.values if isinstance(value, _Array) else value for key, value in entry.items()}
