"""Pickles of NumPy arrays, read without running the code that they name.

Unpickling calls whatever functions a pickle names. This module looks names up in a table of a few NumPy names, and
replaces them by its own functions, which take the state of a pickled array, check it and create the array from its
bytes. Apart from arrays, a pickle can create only values that have opcodes: numbers, texts, bytes, lists, tuples,
dicts and sets. Protocols 2 to 5 are supported, from NumPy before and after 2.0, and from Python 2, whose bytes are
texts.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.untrusted.pickle_scan import MEMORY, scan, shown


@dataclass(frozen=True)
class Admitted:
    """Allowed dtypes of arrays.

    Attributes:
        dtypes: names of the dtypes in a pickle; :data:`OBJECTS` allows arrays of objects.
    """

    description: str
    dtypes: tuple[str, ...]


OBJECTS = "O8"
INTEGERS = ("b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)))
"""Dtypes of integers and booleans."""
NUMBERS = Admitted("numbers", (*INTEGERS, "f2", "f4", "f8"))

_ARRAY, _DTYPE, _RECONSTRUCT, _FROM_BUFFER, _ENCODE = "ndarray", "dtype", "_reconstruct", "_frombuffer", "encode"
_ADMITTED = {("numpy", _ARRAY): _ARRAY, ("numpy", _DTYPE): _DTYPE, ("_codecs", _ENCODE): _ENCODE}
_ADMITTED |= {(f"numpy.{core}.multiarray", _RECONSTRUCT): _RECONSTRUCT for core in ("core", "_core")}
_ADMITTED |= {(f"numpy.{core}.numeric", _FROM_BUFFER): _FROM_BUFFER for core in ("core", "_core")}
_EMPTY = "bytes"  # protocol 2 writes empty bytes as a call
_ADMITTED |= {("__builtin__", _EMPTY): _EMPTY}

DAMAGE = (
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
"""Exceptions from unpickling damaged bytes."""


class Refused(Exception):
    """The pickle requests more than data. Callers put the name of the file before the message, which has the reason."""


def load_arrays(content: bytes, name: str = "a pickle", inside: str | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of a pickled dict, such as encoded pictures and captions, or the weights of a network.

    Args:
        name: name of the file or member, for messages.
        inside: key of a dict within the dict. If it exists, its arrays are returned, and other entries are ignored.

    Returns:
        Arrays of booleans, integers or floats by name. They are views of read-only bytes.

    Raises:
        DataError: the pickle is truncated or damaged, is not a dict of arrays by name, or requests anything but
            arrays; nothing that it requests is executed.
    """
    file = io.BytesIO(content)
    # Protocol 2 writes bytes as texts, which a call converts. So allow memory for a copy of the content.
    found = _load(file, ArrayUnpickler(file, NUMBERS), name, MEMORY + 2 * len(content))
    if not isinstance(found, dict):
        raise DataError(f"{name} holds no dict of arrays, but a {_kind(found)}")
    if inside is not None and isinstance(found.get(inside), dict):
        found = found[inside]
    arrays = {}
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, PickledArray) or not isinstance(value.values, np.ndarray):
            raise DataError(f"{name} holds a {_kind(value)} under {_key(key)}, where an array with a name is expected")
        arrays[key] = value.values
    return arrays


def load_values(content: bytes, name: str = "a pickle") -> dict[Any, Any]:
    """Return a pickled dict of plain values: numbers, texts, bytes, lists, tuples and dicts.

    Args:
        name: name of the file, for messages.

    Raises:
        DataError: the pickle is truncated or damaged, is no dict, has bytes behind its end, or requests anything but
            plain values; nothing that it requests is executed.
    """
    file = io.BytesIO(content)
    found = _load(file, _PlainUnpickler(file), name, MEMORY)
    if not isinstance(found, dict):
        raise DataError(f"{name} holds no dict, but a {_kind(found)}")
    return found


def _load(file: io.BytesIO, unpickler: pickle.Unpickler, name: str, memory: int) -> object:
    """Return what the pickle in ``file`` holds, after a check that reading it needs at most ``memory`` bytes.

    Raises:
        DataError: the pickle is refused or damaged, or the file has bytes behind its end.
    """
    try:
        scan(file.getvalue(), memory=memory)
        found: object = unpickler.load()
    except Refused as error:
        raise DataError(f"{name}: {error}; do not use this file, and ask where it comes from") from error
    except DAMAGE as error:
        raise DataError(f"{name} is damaged, or no pickle: {type(error).__name__}: {error}") from error
    if file.read(1):
        raise DataError(f"{name} goes on behind the end of its pickle")
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every name."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse the name."""
        raise Refused(f"its pickle asks for {module}.{name}, which a file of plain values has no use for")


class PickledArray:
    """A pickled array, empty until its state is set.

    Attributes:
        values: the array; for an array of objects, a list of them.
    """

    __slots__ = ("_admitted", "values")

    def __init__(self, admitted: Admitted) -> None:
        self.values: NDArray[Any] | list[Any] | None = None
        self._admitted = admitted

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        self.fill(shape, dtype, "F" if fortran else "C", content)

    def fill(self, shape: Any, dtype: Any, order: str, content: Any) -> None:
        """Create the array from its pickled state.

        Args:
            order: memory order, ``C`` or ``F``.
            content: bytes of the array, also as latin-1 text; a list of the elements of an array of objects.

        Raises:
            Refused: its dtype is not allowed.
            ValueError: the state is garbled, or shape and content do not match.
        """
        if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or order not in ("C", "F"):
            raise ValueError("the state of an array is garbled")
        if len(shape) > 64 or not all(type(axis) is int and 0 <= axis < 2**63 for axis in shape):
            raise ValueError("an array of a shape that is no tuple of sizes")
        plain = dtype.numpy(self._admitted)
        if plain is None:
            if len(shape) != 1 or not isinstance(content, list) or len(content) != shape[0]:
                raise ValueError(f"not the objects of an array of shape {_sizes(shape)}")
            self.values = content
            return
        if isinstance(content, str):
            content = content.encode("latin1")
        if not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) * plain.itemsize:
            raise ValueError(f"not the bytes of an array of shape {_sizes(shape)}")
        self.values = np.frombuffer(content, plain).reshape(shape, order="F" if order == "F" else "C")


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays of the ``admitted`` dtypes as :class:`PickledArray`, and refuses every other name."""

    def __init__(self, file: BinaryIO, admitted: Admitted) -> None:
        super().__init__(file, encoding="latin1")  # NumPy restores bytes of Python 2 from it
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for one of NumPy's names."""
        kind = _ADMITTED.get((module, name))
        if kind == _ARRAY:
            return _ArrayName()
        if kind == _DTYPE:
            return lambda name, align=False, copy=True: _Dtype(name, align, copy)
        if kind == _RECONSTRUCT:
            return lambda subtype, shape, code: self._reconstruct(subtype, shape)
        if kind == _FROM_BUFFER:
            return self._from_buffer
        if kind == _ENCODE:
            return lambda text, encoding: _encode(text, encoding)  # a new function, because a pickle can modify it
        if kind == _EMPTY:
            return lambda: b""
        raise Refused(f"its pickle asks for {module}.{name}, which a file of arrays has no use for")

    def _reconstruct(self, subtype: Any, shape: Any) -> PickledArray:
        if not isinstance(subtype, _ArrayName) or shape != (0,):
            raise ValueError("an array is made in an unknown way")
        return PickledArray(self._admitted)

    def _from_buffer(self, content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray:
        if axes is not None:
            raise ValueError("an array of transposed axes")
        array = PickledArray(self._admitted)
        array.fill(shape, dtype, order, bytes(content) if isinstance(content, bytearray) else content)
        return array


class _Dtype:
    """A pickled dtype: ``dtype(text, align, copy)``, and then its state, of which only the byte order matters."""

    __slots__ = ("name", "order")

    def __init__(self, name: str, align: bool, copy: bool) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise ValueError(f"byte order {shown(state[1])}")
        self.order = state[1]

    def numpy(self, admitted: Admitted) -> np.dtype[Any] | None:
        """Return NumPy's dtype; None for objects."""
        if not isinstance(self.name, str) or self.name not in admitted.dtypes:
            raise Refused(
                f"its pickle has an array of dtype {shown(self.name)}, where {admitted.description} are expected"
            )
        return None if self.name == OBJECTS else np.dtype(f"{self.order}{self.name}")


class _ArrayName:
    """Placeholder for the class ``numpy.ndarray``, which a pickle can name but not use otherwise."""

    __slots__ = ()


def _encode(text: Any, encoding: Any) -> bytes:
    """Return bytes that protocol 2 wrote as text."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError(f"bytes in the encoding {shown(encoding)}")
    return text.encode("latin1")


def _key(key: object) -> str:
    return str(key) if type(key) is int and abs(key) < 2**64 else shown(key)


def _sizes(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape[:8]))}{', ...' if len(shape) > 8 else ''})"


def _kind(value: object) -> str:
    return "array" if isinstance(value, PickledArray) else type(value).__name__
