"""Uncompressed Zarr arrays of version 2, read by region and written, without a library.

An array is a folder. ``.zarray`` has its shape, dtype and chunk shape; a file ``i.j.k`` is the chunk at that position
of the grid, in C order. All chunks have the same size. In chunks that extend beyond the array, the values outside are
undefined (https://zarr-specs.readthedocs.io, "Zarr Storage Specification Version 2").

The format allows missing chunks, which mean the fill value. Checkpoints are always written completely, so this module
treats a missing chunk as damage.
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
"""Names of dtypes. TensorStore writes ``bfloat16``; zarr-python, which sees two opaque bytes, writes ``<V2``."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if not name.endswith("V2")}

Region = Sequence[tuple[int, int]]
"""For each dimension the first index and the last index + 1."""


@dataclass(frozen=True)
class ZarrPiece:
    """Part of a region in one chunk.

    Attributes:
        chunk: position of the chunk in the grid.
        inside: ranges within the chunk, relative to its start.
        target: slices of the region.
    """

    chunk: tuple[int, ...]
    inside: tuple[tuple[int, int], ...]
    target: tuple[slice, ...]


@dataclass(frozen=True)
class ZarrArray:
    """An array in a folder; :meth:`open` it or :meth:`create` it. Values are read only on request.

    Attributes:
        chunks: the shape of a chunk.
        separator: separator of the numbers in a chunk's name.
    """

    folder: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    separator: str = "."

    @classmethod
    def open(cls, folder: Path) -> ZarrArray:
        """Return the array in ``folder``, without reading values.

        Raises:
            CheckpointError: there is no array, its metadata are damaged, or its compression, order, dtype or version
                is not supported.
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
        """Write the metadata of a new array into ``folder``, created if needed. Chunks must be written afterwards.

        Raises:
            ValueError: the format does not support the dtype, or chunks and shape do not match.
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
        """Size of every chunk's file in bytes."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def file(self, chunk: Sequence[int]) -> Path:
        """Return the path of a chunk."""
        return self.folder / self.separator.join(map(str, chunk))

    def pieces(self, region: Region) -> Iterator[ZarrPiece]:
        """Yield the pieces of a region, one for each chunk that it overlaps, in C order.

        Raises:
            ValueError: the region is outside the array, or empty.
        """
        if len(region) != len(self.shape) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(region, self.shape, strict=True)
        ):
            raise ValueError(f"{self.folder}: no region {list(region)} in an array of shape {list(self.shape)}")
        grid = [range(start // size, -(-stop // size)) for (start, stop), size in zip(region, self.chunks, strict=True)]
        for chunk in itertools.product(*grid):
            inside, target = [], []
            for number, size, (start, stop) in zip(chunk, self.chunks, region, strict=True):
                origin = number * size
                first, end = max(start, origin), min(stop, origin + size)
                inside.append((first - origin, end - origin))
                target.append(slice(first - start, end - start))
            yield ZarrPiece(chunk, tuple(inside), tuple(target))

    def check(self, region: Region) -> None:
        """Check that all chunks of a region exist and are complete, from their sizes only.

        Raises:
            CheckpointError: one is missing, truncated or too long.
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

    def read_piece(self, piece: ZarrPiece, pin: bool = False) -> Tensor:
        """Return the values of a piece, read with one call from its first to its last value. Thread-safe.

        Args:
            pin: use pinned memory, for asynchronous copies to a GPU.

        Raises:
            CheckpointError: the chunk is missing, truncated or cannot be read.
        """
        strides = [math.prod(self.chunks[dim + 1 :]) for dim in range(len(self.chunks))]
        first = sum(start * stride for (start, _), stride in zip(piece.inside, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(piece.inside, strides, strict=True))
        flat = torch.empty(last - first + 1, dtype=self.dtype, pin_memory=pin)
        _read(self.file(piece.chunk), flat, first * self.dtype.itemsize)
        return flat.as_strided([stop - start for start, stop in piece.inside], strides)

    def read(self, region: Region | None = None) -> Tensor:
        """Return the values of a region; default: the whole array. Raises as :meth:`pieces` and :meth:`read_piece`."""
        region = [(0, size) for size in self.shape] if region is None else region
        out = torch.empty([stop - start for start, stop in region], dtype=self.dtype)
        for piece in self.pieces(region):
            out[piece.target].copy_(self.read_piece(piece))
        return out

    def write(self, values: Tensor, origin: Sequence[int] | None = None) -> None:
        """Write complete chunks.

        Args:
            values: any floating dtype, on any device; rounded to the dtype of the array.
            origin: position of the first value in the array; default: its start. Start and end must be chunk
                boundaries, or the end of the array.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
            ValueError: the values do not cover their chunks, or extend beyond the array.
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
            chunk[tuple(slice(0, size) for size in extent)].copy_(values[piece.target])
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
