"""Records of arrays with fixed names and types: the sizes of the variable axes, and then the values of all arrays.

A description maps each name to a type and a shape, in which a letter stands for a variable axis:
``{"pos": ("<f4", ("N", 3))}``. A record has the size of each letter, in order of appearance, as little-endian uint32,
and then the arrays in C order, in the order of the description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fields = Mapping[str, tuple[str, tuple[int | str, ...]]]
_SIZE = np.dtype("<u4")


def pack(arrays: Mapping[str, Any], fields: Fields) -> bytes:
    """Return the record of ``arrays``.

    Raises:
        ValueError: an array has another shape, a number does not fit its type, or a value is not finite.
    """
    sizes: dict[str, int] = {}
    parts = []
    for name, (kind, axes) in fields.items():
        value = np.asarray(arrays[name])
        for axis, size in zip(axes, value.shape, strict=False):
            if isinstance(axis, str):
                sizes.setdefault(axis, size)
        if value.shape != (shape := _shape(axes, sizes)):
            raise ValueError(f"{name} has the shape {value.shape}, not {shape}")
        if not np.isfinite(value).all():
            raise ValueError(f"{name} is not finite")
        stored = value.astype(kind)
        if stored.dtype.kind in "iu" and not np.array_equal(stored, value):
            raise ValueError(f"{name} has numbers that are no {stored.dtype}")
        parts.append(stored.tobytes())
    return b"".join([np.array([*sizes.values()], _SIZE).tobytes(), *parts])


def unpack(content: bytes, fields: Fields) -> dict[str, NDArray[Any]]:
    """Return the arrays of a record by name, as views.

    Raises:
        ValueError: the record is truncated or damaged.
    """
    letters = dict.fromkeys(axis for _, axes in fields.values() for axis in axes if isinstance(axis, str))
    first = _SIZE.itemsize * len(letters)
    if len(content) < first:
        raise ValueError("it is truncated")
    sizes = dict(zip(letters, np.frombuffer(content, _SIZE, len(letters)).tolist(), strict=True))
    shapes = {name: _shape(axes, sizes) for name, (_, axes) in fields.items()}
    needed = first + sum(np.dtype(fields[name][0]).itemsize * math.prod(shape) for name, shape in shapes.items())
    if len(content) != needed:
        raise ValueError(f"it has {len(content):,} bytes; with the sizes {sizes} it takes {needed:,}")
    arrays = {}
    for name, shape in shapes.items():
        values = np.frombuffer(content, fields[name][0], math.prod(shape), first)
        arrays[name] = values.reshape(shape)
        first += values.nbytes
    return arrays


def _shape(axes: tuple[int | str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes.get(axis, 0) if isinstance(axis, str) else axis for axis in axes)
