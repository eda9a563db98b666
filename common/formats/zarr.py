"""Uncompressed Zarr arrays of version 2, read by region and written, without a library.

An array is a folder. ``.zarray`` says its shape, dtype and the shape of its chunks; a file ``i.j.k`` is the chunk at
that place of the grid, in C order. All chunks have the same size, also those that reach beyond the array, where what
they hold means nothing (https://zarr-specs.readthedocs.io, "Zarr Storage Specification Version 2").

The format lets a chunk be missing, which then is the fill value. Whoever wrote a checkpoint wrote all of it, so that
here a missing chunk is damage.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError, DataError
from common.untrusted.strict_json import read_json_object

METADATA = ".zarray"
_MOST_METADATA_BYTES = 1 << 20
_BFLOAT16 = "bfloat16"
_DTYPES = {
    _BFLOAT16: torch.bfloat16,
    "<V2": torch.bfloat16,
    "|V2": torch.bfloat16,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<i4": torch.int32,
    "<i8": torch.int64,
}
"""Names of dtypes. TensorStore writes ``bfloat16``; zarr-python, for which it is two bytes of something, ``<V2``."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if not name.endswith("V2")}

Region = Sequence[tuple[int, int]]
"""Of each dimension the first index and the one behind the last."""


@dataclass(frozen=True)
class Piece:
    """What a region has of one chunk.

    Attributes:
        chunk: its place in the grid.
        inside: the part of the chunk, from the chunk's own start.
        place: where it is in the region.
    """

    chunk: tuple[int, ...]
    inside: tuple[tuple[int, int], ...]
    place: tuple[slice, ...]


@dataclass(frozen=True)
class ZarrArray:
    """An array in a folder; :meth:`open` it or :meth:`create` it. No value is read before it is wanted.

    Attributes:
        folder: see the module.
        shape: of the array.
        chunks: the shape of a chunk.
        dtype: of the values.
        separator: between the numbers in a chunk's name.
    """

    folder: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    separator: str = "."

    @classmethod
    def open(cls, folder: Path) -> ZarrArray:
        """The array in ``folder``.

        Raises:
            CheckpointError: there is none, what describes it is damaged, or it is compressed, in Fortran's order or of
                another dtype or version than can be read.
        """
        path = folder / METADATA
        found = _metadata(path)
        if found.get("zarr_format") != 2:
            raise CheckpointError(f"{path}: zarr_format {found.get('zarr_format')!r}, and version 2 can be read")
        if found.get("compressor") is not None or found.get("filters"):
            raise CheckpointError(f"{path}: its chunks are compressed or filtered; write the array without")
        if found.get("order") != "C":
            raise CheckpointError(f"{path}: order {found.get('order')!r}, and C can be read")
        name = found.get("dtype")
        if not isinstance(name, str) or name not in _DTYPES:
            raise CheckpointError(f"{path}: dtype {name!r}, and {', '.join(_DTYPES)} can be read")
        separator = found.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise CheckpointError(f"{path}: dimension_separator {separator!r}, which is none of the format's")
        shape, chunks = _sizes(path, found, "shape"), _sizes(path, found, "chunks")
        if len(shape) != len(chunks):
            raise CheckpointError(f"{path}: shape {list(shape)} does not go with chunks {list(chunks)}")
        return cls(folder, shape, chunks, _DTYPES[name], separator)

    @classmethod
    def create(cls, folder: Path, shape: Sequence[int], chunks: Sequence[int], dtype: torch.dtype) -> ZarrArray:
        """Describe a new array in ``folder``, made if need be; its chunks are yet to be written.

        Raises:
            ValueError: the format has no name for the dtype, or the chunks do not go with the shape.
        """
        if dtype not in _NAMES:
            raise ValueError(f"no Zarr array is written of {dtype}")
        if len(shape) != len(chunks) or not shape or min(*shape, *chunks) < 1:
            raise ValueError(f"shape {tuple(shape)} does not go with chunks {tuple(chunks)}")
        content = {
            "zarr_format": 2,
            "shape": list(shape),
            "chunks": list(chunks),
            "dtype": _NAMES[dtype],
            "compressor": None,
            "fill_value": None,
            "filters": None,
            "order": "C",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METADATA).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return cls(folder, tuple(shape), tuple(chunks), dtype)

    @property
    def chunk_bytes(self) -> int:
        """Of the file of every chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def file(self, chunk: Sequence[int]) -> Path:
        """Of a chunk."""
        return self.folder / self.separator.join(map(str, chunk))

    def pieces(self, region: Region) -> Iterator[Piece]:
        """The chunks that a region touches, in C order, and what it has of each.

        Raises:
            ValueError: the region lies outside the array, or is empty.
        """
        if len(region) != len(self.shape) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(region, self.shape, strict=True)
        ):
            raise ValueError(f"{self.folder}: no region {list(region)} in an array of shape {list(self.shape)}")
        grid = [range(start // size, -(-stop // size)) for (start, stop), size in zip(region, self.chunks, strict=True)]
        for chunk in itertools.product(*grid):
            inside, place = [], []
            for number, size, (start, stop) in zip(chunk, self.chunks, region, strict=True):
                origin = number * size
                first, end = max(start, origin), min(stop, origin + size)
                inside.append((first - origin, end - origin))
                place.append(slice(first - start, end - start))
            yield Piece(chunk, tuple(inside), tuple(place))

    def check(self, region: Region) -> None:
        """Look whether all chunks of a region are there and whole, by their sizes alone.

        Raises:
            CheckpointError: one is missing, cut off or too long.
        """
        for piece in self.pieces(region):
            path = self.file(piece.chunk)
            try:
                status = path.stat()
            except FileNotFoundError:
                raise CheckpointError(f"{path}: a chunk is missing; fetch the folder again") from None
            except OSError as error:
                raise CheckpointError(f"{path}: a chunk cannot be read: {error.strerror}") from error
            if not stat.S_ISREG(status.st_mode) or status.st_size != self.chunk_bytes:
                raise CheckpointError(
                    f"{path}: a chunk of {status.st_size:,} bytes, where {self.chunk_bytes:,} are expected: cut off or "
                    "damaged; fetch it again"
                )

    def read_piece(self, piece: Piece, pin: bool = False) -> Tensor:
        """What a region has of a chunk, from its first to its last value in one read; any number of threads may.

        Args:
            piece: of :meth:`pieces`.
            pin: into memory that a GPU copies from by itself.

        Raises:
            CheckpointError: the chunk is missing, cut off or cannot be read.
        """
        strides = [math.prod(self.chunks[dim + 1 :]) for dim in range(len(self.chunks))]
        first = sum(start * stride for (start, _), stride in zip(piece.inside, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(piece.inside, strides, strict=True))
        flat = torch.empty(last - first + 1, dtype=self.dtype, pin_memory=pin)
        _read(self.file(piece.chunk), flat, first * self.dtype.itemsize)
        return flat.as_strided([stop - start for start, stop in piece.inside], strides)

    def read(self, region: Region | None = None) -> Tensor:
        """The values of a region, or all.

        Raises:
            CheckpointError: see :meth:`read_piece`.
            ValueError: see :meth:`pieces`.
        """
        region = [(0, size) for size in self.shape] if region is None else region
        out = torch.empty([stop - start for start, stop in region], dtype=self.dtype)
        for piece in self.pieces(region):
            out[piece.place].copy_(self.read_piece(piece))
        return out

    def write(self, values: Tensor, origin: Sequence[int] | None = None) -> None:
        """Write whole chunks.

        Args:
            values: of any floating dtype and on any device; they are rounded to that of the array.
            origin: where in the array they begin; None for its start. They begin and end where chunks do, or where the
                array ends.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
            ValueError: they do not cover their chunks, or reach beyond the array.
        """
        origin = origin or (0,) * len(self.shape)
        region = [(start, start + size) for start, size in zip(origin, values.shape, strict=True)]
        for piece in self.pieces(region):
            extent = [
                min(size, whole - number * size)
                for number, size, whole in zip(piece.chunk, self.chunks, self.shape, strict=True)
            ]
            if [stop - start for start, stop in piece.inside] != extent:
                raise ValueError(f"{self.folder}: {region} has a part of chunk {piece.chunk}; write whole chunks")
            chunk = torch.zeros(self.chunks, dtype=self.dtype)
            chunk[tuple(slice(0, size) for size in extent)].copy_(values[piece.place])
            path = self.file(piece.chunk)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chunk.flatten().view(torch.uint8).numpy().data)


def _metadata(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: {path.parent.name} is no Zarr array")
    try:
        return read_json_object(path, most=_MOST_METADATA_BYTES)
    except DataError as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error


def _sizes(path: Path, found: dict[str, Any], key: str) -> tuple[int, ...]:
    sizes = found.get(key)
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{path}: {key} {sizes!r}, where positive whole numbers are expected")
    return tuple(sizes)


def _read(path: Path, flat: Tensor, offset: int) -> None:
    """Fill ``flat`` with the file's bytes from ``offset`` on."""
    missing = flat.view(torch.uint8).numpy().data
    wanted = len(missing)
    try:
        with open(path, "rb", buffering=0) as file:
            while missing:
                count = os.preadv(file.fileno(), [missing], offset)
                if not count:
                    raise CheckpointError(
                        f"{path}: the chunk is cut off, {len(missing):,} of {wanted:,} bytes missing; fetch it again"
                    )
                missing, offset = missing[count:], offset + count
    except FileNotFoundError:
        raise CheckpointError(f"{path}: a chunk is missing; fetch the folder again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: a chunk cannot be read: {error.strerror}") from error
