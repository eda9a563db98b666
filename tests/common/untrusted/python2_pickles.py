"""Pickles of Python 2, in which bytes are texts. They are built from opcodes, because Python 3 does not write them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np


def python2_pickle(value: Any) -> bytes:
    """Return a pickle, protocol 2, of nested dicts, arrays, and bytes (the texts of Python 2)."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    if isinstance(value, Mapping):
        return b"}(" + b"".join(_text(key.encode("ascii")) + _opcodes(item) for key, item in value.items()) + b"u"
    return _array(value) if isinstance(value, np.ndarray) else _text(value)


def _text(content: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(content)) + content


def _integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _array(array: np.ndarray) -> bytes:
    order, kind = array.dtype.str[0], array.dtype.str[1:]
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + _integer(0) + b"\x85" + _text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + _text(kind.encode("ascii")) + _integer(0) + _integer(1) + b"\x87R"
    dtype += b"(" + _integer(3) + _text(order.encode("ascii")) + b"NNN" + _integer(-1) * 2 + _integer(0) + b"tb"
    shape = b"(" + b"".join(_integer(side) for side in array.shape) + b"t"
    return made + b"(" + _integer(1) + shape + dtype + b"\x89" + _text(array.tobytes()) + b"tb"
