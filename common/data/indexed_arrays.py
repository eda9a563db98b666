"""Samples of bf16 arrays that lie in a few large files: an index of their positions, and batches read in place.

Threads read each array with one ``pread`` into the batch. Files of any format are possible whose arrays are
uncompressed. Each row of the index has the number of the file, the offset of each array in it, and the integer of the
sample, if samples have one.

Legend: S samples, A arrays of a sample, N samples of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import atomic
from common.data.manifest import Manifest, file_entry
from common.data.open_files import OpenFile, OpenFiles
from common.data.threads import PendingBatch, SampleThreads
from common.errors import DataError
from common.formats import npy
from common.formats.array_shards import ArrayShards, require_finite

INDEX = "index.npy"
_LEAST_OPEN = 16
"""Least number of files that stay open: batches that are read ahead may lie in several small files."""


@dataclass(frozen=True)
class IndexedArrays:
    """The samples of one folder.

    Attributes:
        files: the files, in order.
        numbers_S: int64, number of the file.
        offsets_SA: int64, offsets of the values of the arrays in the file, in bytes.
        integers_S: int64, integers of the samples; None if they have none.
        shapes: shape of each array by name, in the order of the offsets.
    """

    files: tuple[Path, ...]
    numbers_S: NDArray[np.int64]
    offsets_SA: NDArray[np.int64]
    integers_S: NDArray[np.int64] | None
    shapes: Mapping[str, tuple[int, ...]]


def index_shard(
    path: Path, part: Path, shards: ArrayShards, shapes: Mapping[str, tuple[int, ...]], end: int | None
) -> dict[str, Any]:
    """Read a whole shard, and write its part of the index to the file ``part``.

    Args:
        end: the samples have integers below this number; None: they have none.

    Returns:
        ``samples``, ``bytes`` and ``sha256`` of the shard.

    Raises:
        DataError: the shard is damaged, an array has another dtype or shape or values that are not finite, or an
            integer is missing or out of its range.
    """
    offsets_SA = shards.offsets(path, shapes)
    require_finite(path, offsets_SA, shapes)
    atomic.save(part, offsets_SA if end is None else np.column_stack([offsets_SA, shards.integers(path, end)]))
    entry = file_entry(path)
    return {"samples": len(offsets_SA), "bytes": entry.bytes, "sha256": entry.sha256}


def write_index(folder: Path, parts: Sequence[Path]) -> NDArray[np.int64]:
    """Write and return the index of a folder, given those of its files, in the order of their names."""
    rows = [np.load(part) for part in parts]
    numbers_S = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    index = np.column_stack([numbers_S, np.concatenate(rows)])
    atomic.save(folder / INDEX, index)
    return index


def open_index(
    root: Path,
    found: Manifest,
    folder: str,
    samples: int,
    shapes: Mapping[str, tuple[int, ...]],
    remedy: str,
    integers: bool = False,
) -> IndexedArrays:
    """Open the samples of a folder of prepared data: all of its files that are no ``.npy``, sorted by name.

    Args:
        found: manifest of the data in ``root``.
        samples: required number of samples.
        integers: whether the samples have integers.
        remedy: advice to the user, for messages.

    Raises:
        DataError: the index is missing or damaged, or does not match the files.
    """
    names = sorted(name for name in found.files if name.startswith(f"{folder}/") and not name.endswith(".npy"))
    path = root / folder / INDEX
    arrays = len(shapes)
    index = npy.required(path, np.dtype(np.int64), (samples, 1 + arrays + integers), remedy)
    numbers, offsets = index[:, 0], index[:, 1 : 1 + arrays]
    sizes = np.array([found.files[name].bytes for name in names])
    if numbers.min() < 0 or numbers.max() >= len(names) or ((offsets < 0) | (offsets >= sizes[numbers][:, None])).any():
        raise DataError(f"{path} has positions outside of the files; {remedy}")
    files = tuple(root / name for name in names)
    return IndexedArrays(files, numbers, offsets, index[:, -1] if integers else None, shapes)


class ArrayBatches:
    """Makes batches of samples, on threads of this process.

    Args:
        most_open: number of files that stay open, if it is more than 16.
        remedy: advice to the user if a file is damaged, for messages.
    """

    def __init__(
        self, arrays: IndexedArrays, threads: int, prefetch: int, pin_memory: bool, most_open: int, remedy: str
    ) -> None:
        self.arrays, self._pin_memory = arrays, pin_memory
        self._files = OpenFiles(max(_LEAST_OPEN, most_open), lambda number: OpenFile(arrays.files[number], remedy))
        self.threads = SampleThreads(threads, prefetch)

    def begin(
        self,
        rows: Sequence[int],
        slots: int,
        others: Mapping[str, Tensor],
        replaced: Sequence[Mapping[str, Tensor]] = (),
    ) -> PendingBatch:
        """Start to read ``rows`` into the first of ``slots`` slots; the rest is zero.

        Args:
            others: tensors that are added to the batch, by name.
            replaced: arrays of each row, by name, that replace those of its sample.
        """
        tensors = {
            name: torch.empty((slots, *shape), dtype=torch.bfloat16, pin_memory=self._pin_memory)
            for name, shape in self.arrays.shapes.items()
        }
        for tensor in tensors.values():
            tensor[len(rows) :].zero_()
        memory = {name: tensor.view(torch.uint8).numpy() for name, tensor in tensors.items()}
        files = [self._files.file(number) for number in self.arrays.numbers_S[rows].tolist()]
        offsets_NA = self.arrays.offsets_SA[rows]

        def fill(slot: int) -> None:
            given = replaced[slot] if replaced else {}
            for name, offset in zip(tensors, offsets_NA[slot].tolist(), strict=True):
                if name in given:
                    tensors[name][slot] = given[name]
                else:
                    values = memoryview(memory[name][slot]).cast("B")
                    files[slot].read_into(offset, values, f"{name} of sample {rows[slot]}")

        pinned = {name: tensor.pin_memory() if self._pin_memory else tensor for name, tensor in others.items()}
        return self.threads.begin({**tensors, **pinned}, len(rows), fill)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
