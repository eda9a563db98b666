"""Pickled graphs of PyTorch Geometric 1, read without running the code that they name.

OpenCatalyst's official LMDB files have ``torch_geometric.data.data.Data`` objects of version 1.7, which later versions
cannot read. Such an object is a class name and a dict. Each tensor in it has a storage, which is a file of
``torch.save`` in the older format within the pickle: four pickles, the names of the storages, and the bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.untrusted.pickle_scan import MEMORY, scan
from common.untrusted.pickled_arrays import DAMAGE, NUMBERS, ArrayUnpickler, PickledArray, Refused

GRAPH = ("torch_geometric.data.data", "Data")
_STORAGE = ("torch.storage", "_load_from_bytes")
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_HOOKS = ("collections", "OrderedDict")
_SCALARS = {(f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")}
_STORAGES = {
    ("torch", f"{name}Storage"): kind
    for name, kind in {
        "Float": "<f4", "Double": "<f8", "Long": "<i8", "Int": "<i4", "Short": "<i2", "Char": "<i1", "Byte": "<u1",
        "Bool": "?",
    }.items()
}  # fmt: skip
_PICKLES = 4
"""Pickles of a stored storage before its names: magic number, version, machine, and the storage itself."""


def load_graph(content: bytes, name: str) -> dict[str, NDArray[Any] | int | float]:
    """Return the tensors and numbers of a pickled graph by name; other values are left out.

    Args:
        name: name of the sample, for messages.

    Raises:
        DataError: the pickle is truncated or damaged, is no graph of PyTorch Geometric 1, or requests anything but
            graphs, tensors and arrays; nothing that it requests is executed.
    """
    file = io.BytesIO(content)
    try:
        scan(content, memory=MEMORY + 2 * len(content))
        found = _GraphUnpickler(file, NUMBERS).load()
    except Refused as error:
        raise DataError(f"{name}: {error}; do not use this file, and ask where it comes from") from error
    except (*DAMAGE, struct.error) as error:
        raise DataError(f"{name} is damaged, or no pickle: {type(error).__name__}: {error}") from error
    state = getattr(found, "state", None)
    if not isinstance(found, _Graph) or not isinstance(state, dict):
        raise DataError(f"{name} holds a {type(found).__name__}, where a graph of PyTorch Geometric 1 is expected")
    values = {key: value.values if isinstance(value, PickledArray) else value for key, value in state.items()}
    return {key: value for key, value in values.items() if isinstance(value, np.ndarray | int | float)}


class _Graph:
    """State of a pickled graph."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _GraphUnpickler(ArrayUnpickler):
    """Unpickles a graph as :class:`_Graph` and its tensors as arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for one of the names in such a graph."""
        if (module, name) == GRAPH:
            return type("Graph", (_Graph,), {"__slots__": ()})  # a new class, because a pickle can modify it
        if (module, name) == _STORAGE:
            return lambda content: _storage(content)
        if (module, name) == _TENSOR:
            return lambda *arguments: _tensor(*arguments[:4])
        if (module, name) == _HOOKS:
            return lambda: None
        if (module, name) in _SCALARS:
            return self._scalar
        return super().find_class(module, name)

    def _scalar(self, dtype: Any, content: Any) -> NDArray[Any]:
        array = PickledArray(NUMBERS)
        array.fill((), dtype, "C", content)
        assert isinstance(array.values, np.ndarray)
        return array.values


class _StorageUnpickler(pickle.Unpickler):
    """Unpickles a storage as its dtype and number of elements."""

    def persistent_load(self, reference: Any) -> Any:
        """Return dtype and number of elements of the storage that a pickle refers to."""
        kind, dtype, _, _, elements = reference[:5]
        if kind != "storage" or dtype not in _STORAGES.values() or type(elements) is not int or elements < 0:
            raise ValueError("the reference to a storage is garbled")
        return np.dtype(dtype), elements

    def find_class(self, module: str, name: str) -> Any:
        """Return the name of the dtype of a class of storages."""
        if (module, name) in _STORAGES:
            return _STORAGES[module, name]
        raise Refused(f"its pickle asks for {module}.{name}, which a file of arrays has no use for")


def _storage(content: Any) -> NDArray[Any]:
    """Return the elements of a storage in the older format of ``torch.save``."""
    if not isinstance(content, bytes):
        raise ValueError("a storage without bytes")
    position = 0
    for _ in range(_PICKLES + 1):
        position = scan(content, position)
    file, values = io.BytesIO(content), []
    for _ in range(_PICKLES + 1):
        values.append(_StorageUnpickler(file).load())
    dtype, elements = values[_PICKLES - 1]
    (stored,) = struct.unpack("<q", file.read(8))
    data = file.read()
    if stored != elements or len(data) != elements * dtype.itemsize:
        raise ValueError(f"a storage of {elements} elements has {len(data):,} bytes")
    return np.frombuffer(data, dtype)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> NDArray[Any]:
    """Return a tensor as a view of its storage."""
    numbers = [offset, *size, *stride]
    if not isinstance(storage, np.ndarray) or len(size) != len(stride) or len(size) > 8:
        raise ValueError("a tensor is garbled")
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers) or math.prod(size) > len(storage):
        raise ValueError("a tensor is larger than its storage")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= len(storage):
        raise ValueError("a tensor lies outside of its storage")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)
