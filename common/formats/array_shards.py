"""Samples of bf16 arrays in shards of two published forms.

- arrow: a data set of Hugging Face's library, saved to disk (:mod:`common.formats.saved_dataset`), with a column for
  each array, ``__key__`` and the column of an integer;
- tar: ``shard_000000.tar`` ... as NVIDIA repacks such data sets: ``KEY.NAME.bytes`` for each array, and ``KEY.json``
  with ``key`` and the integer.

Each array is a ``.npy`` of its bits as uint16, because numpy lacks bf16. Legend: S samples of a shard, A arrays of a
sample.
"""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import DataError
from common.formats import saved_dataset
from common.formats.raw_files import add_member
from common.formats.tar_index import index_tar, numbered_tars
from common.untrusted.array_file import HEADER_BYTES, parse_header
from common.untrusted.strict_json import StrictJsonError, parse_object

KEY = "__key__"
TAR, TARS = "shard_{:06d}.tar", "shard_*.tar"
PATTERNS = (saved_dataset.STATE, TARS)
"""Globs of a file in a folder of shards, by which a search finds the folder: one for each form."""
_BITS = np.dtype("<u2")
_LONGEST_HEADER = HEADER_BYTES + 12  # with magic, version and length


class ArraySample(NamedTuple):
    """A sample to write: its name, bf16 arrays by name, and its integer, if it has one."""

    key: str
    arrays: Mapping[str, Tensor]
    integer: int | None


@dataclass(frozen=True)
class ArrayShards:
    """Names of the arrays in the shards of a data set.

    Attributes:
        columns: column of the arrow form by name of the array.
        integer: name of the integer that samples may have.
    """

    columns: Mapping[str, str]
    integer: str

    @property
    def schema(self) -> pyarrow.Schema:
        """Return the columns of the arrow form."""
        arrays = [(column, pyarrow.binary()) for column in self.columns.values()]
        return pyarrow.schema([(KEY, pyarrow.string()), *arrays, (self.integer, pyarrow.int32())])

    def offsets(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> NDArray[np.int64]:
        """Return (S, A): offsets of the values of each sample's arrays in a shard, in the order of ``shapes``.

        Raises:
            DataError: the shard is truncated or damaged, or an array is missing or has another dtype or shape.
        """
        if path.suffix == ".tar":
            ranges = index_tar(path, [f"{name}.bytes" for name in shapes])[1]
        else:
            ranges = saved_dataset.value_ranges(path, [self.columns[name] for name in shapes])
        with open(path, "rb") as file:
            for column, (name, shape) in enumerate(shapes.items()):
                for row, (offset, size) in enumerate(ranges[:, column].tolist()):
                    begins = os.pread(file.fileno(), _LONGEST_HEADER, offset)
                    where = f"{path}: {name} of sample {row}"
                    ranges[row, column, 0] += values_offset(begins, size, shape, where)
        return ranges[:, :, 0]

    def integers(self, path: Path, end: int) -> NDArray[np.int64]:
        """Return (S,) the integers of a shard, which every sample must have.

        Raises:
            DataError: the shard is truncated or damaged, or an integer is missing or outside of 0 to ``end - 1``.
        """
        name, of_tar = self.integer, path.suffix == ".tar"
        found = self._from_json(path) if of_tar else saved_dataset.column_values(path, name)
        for row, value in enumerate(found):
            if value is None:
                raise DataError(f"{path}: sample {row} has no {name}, which every sample of this split needs")
            if type(value) is not int:
                raise DataError(f"{path}: sample {row} has the {name} {value!r}, which is not an integer")
            if not 0 <= value < end:
                raise DataError(f"{path}: sample {row} has the {name} {value}, outside of 0 to {end - 1}")
        return np.array(found, np.int64)

    def write(self, path: Path, samples: Iterable[ArraySample]) -> None:
        """Write a shard, in the form of the suffix of ``path``: a tar, or else arrow."""
        rows = ((sample, [encoded(sample.arrays[name]) for name in self.columns]) for sample in samples)
        if path.suffix != ".tar":
            columns = [KEY, *self.columns.values(), self.integer]
            named = (dict(zip(columns, (one.key, *arrays, one.integer), strict=True)) for one, arrays in rows)
            saved_dataset.write_shard(path, self.schema, named)
            return
        with tarfile.open(path, "w") as tar:
            for sample, arrays in rows:
                about = {"key": sample.key} | ({self.integer: sample.integer} if sample.integer is not None else {})
                add_member(tar, f"{sample.key}.json", json.dumps(about).encode())
                for name, content in zip(self.columns, arrays, strict=True):
                    add_member(tar, f"{sample.key}.{name}.bytes", content)

    def _from_json(self, path: Path) -> Sequence[object]:
        keys, ranges = index_tar(path, ["json"])
        found: list[object] = []
        with open(path, "rb") as file:
            for key, (offset, size) in zip(keys, ranges[:, 0].tolist(), strict=True):
                content = os.pread(file.fileno(), size, offset).decode("utf-8", "replace")
                try:
                    found.append(parse_object(content).get(self.integer))
                except StrictJsonError as error:
                    raise DataError(f"{path}: {key}.json is {error}") from error
        return found


def shards_of(found: Path) -> list[Path]:
    """Return the shards in the folder of ``found``, in order.

    Args:
        found: a file that matches one of :data:`PATTERNS`; the form is its own.

    Raises:
        DataError: a shard is missing, or a tar has a foreign name.
    """
    if found.suffix != ".tar":
        return saved_dataset.shards_of(found.parent)
    return numbered_tars(found.parent, TAR)


def require_finite(path: Path, offsets_SA: NDArray[np.int64], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Read all arrays at the offsets that :meth:`ArrayShards.offsets` returns.

    Raises:
        DataError: a value is not finite.
    """
    with open(path, "rb") as file:
        for row, offsets in enumerate(offsets_SA.tolist()):
            for (name, shape), offset in zip(shapes.items(), offsets, strict=True):
                file.seek(offset)
                content = bytearray(file.read(2 * math.prod(shape)))
                if not torch.frombuffer(content, dtype=torch.bfloat16).isfinite().all():
                    raise DataError(f"{path}: {name} of sample {row} has values that are not finite; fetch it again")


def encoded(values: Tensor) -> bytes:
    """Return the ``.npy`` of a bf16 array on the CPU.

    Raises:
        TypeError: the array has another dtype.
    """
    if values.dtype != torch.bfloat16:
        raise TypeError(f"{values.dtype} where bf16 is needed")
    bits = values.contiguous().view(torch.int16).numpy().view(_BITS)
    return _header(bits.shape) + bits.tobytes()


def values_offset(begins: bytes, size: int, shape: tuple[int, ...], name: str) -> int:
    """Return the offset of the values in a ``.npy``, in bytes.

    Args:
        begins: its first bytes, up to the longest header; bytes that follow the ``.npy`` are ignored.
        size: size of the ``.npy`` in bytes.
        shape: required shape.
        name: name of the array, for messages.

    Raises:
        DataError: it is no ``.npy`` of uint16 in C order with this shape, or its size is wrong.
    """
    usual = _header(shape)
    offset = len(usual)
    if not begins.startswith(usual):
        try:
            header = parse_header(io.BytesIO(begins[:size]))
        except ValueError as error:
            raise DataError(f"{name} is no .npy: {error}") from error
        if header.dtype != _BITS or header.shape != shape or header.fortran_order:
            raise DataError(f"{name}: {header.dtype} {header.shape}, expected uint16 {shape} in C order")
        offset = header.offset
    if size != (expected := offset + math.prod(shape) * _BITS.itemsize):
        raise DataError(f"{name} has {size:,} bytes, but uint16 {shape} takes {expected:,}")
    return offset


@lru_cache
def _header(shape: tuple[int, ...]) -> bytes:
    """Return the header that ``numpy.save`` writes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": _BITS.str, "fortran_order": False, "shape": shape})
    return header.getvalue()
