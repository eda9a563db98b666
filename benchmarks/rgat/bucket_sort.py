"""Renumber features and sort edges by target, in bounded memory.

Each *piece* of a file is renumbered, and sorted by new row number (features) or by target (edges, once for the relation
and once for its reverse). Each *bucket*, a range of new rows or of targets, then collects its rows or edges from all
pieces and writes them to their final position. Both read and write runs that are as long as the memory allows. Pieces,
and buckets, are independent of one another.

All sorts are stable, so a target's edges are in the order of the file for every number of pieces and buckets. In a
relation between nodes of one type, a target has its original edges, its self-loop, its reversed edges, and the
self-loop again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rgat.graph import Relation
from benchmarks.rgat.prepared import draw_permutations
from benchmarks.rgat.raw import RawArray
from common.data import atomic
from common.data.row_output import RowOutput
from common.data.stages import Record
from common.errors import DataError

BLOCK_BYTES = 16 << 20
"""Bytes that are read at once, if the memory allows."""
ROW_EXTRA = 32
"""Bytes of memory per row in addition to its features: positions and row numbers."""
EDGE_MEMORY = 48
"""Upper bound of the memory, in bytes, per edge of a piece and per edge or target of a bucket."""
BLOCK_EDGES = 1 << 20
"""Edges that are read at once, if the memory allows."""
_BINS = 1 << 20  # a piece counts its edges in this many ranges of targets
_DIGIT = 16  # numpy sorts integers of at most this many bits by radix sort

Pairs = tuple[NDArray[np.int32], NDArray[np.int32]]


def write_permutations(folder: Path, nodes: Mapping[str, int]) -> Record:
    """Write the permutations of all types. Takes 4 bytes of memory per node of a type."""
    for name, numbers in draw_permutations(nodes):
        atomic.save(_path(folder, name), numbers)
    return {"nodes": sum(nodes.values())}


def load_permutation(folder: Path, node_type: str) -> NDArray[np.int32]:
    """Return the new number of each node, memory-mapped."""
    mapped: NDArray[np.int32] = np.load(_path(folder, node_type), mmap_mode="r")
    return mapped


def _path(folder: Path, node_type: str) -> Path:
    return folder / f"{node_type}.npy"


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the bits of ``values`` in e4m3; out-of-range numbers become the largest finite ones."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    bits: NDArray[np.uint8] = (
        torch.from_numpy(values).clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    )
    return bits


def write_feature_piece(
    source: RawArray, permutations: Path, node_type: str, first: int, last: int, memory: int, path: Path
) -> Record:
    """Write rows ``first`` to ``last`` (exclusive) in e4m3, and their new numbers, sorted by number.

    Args:
        memory: upper bound of the size of a block that is read, in bytes.
        path: output file; a second file in its folder has the numbers.

    Raises:
        DataError: a feature is not finite.
    """
    numbers = np.array(load_permutation(permutations, node_type)[first:last])
    order = np.argsort(numbers)
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    rows = np.empty((last - first, source.width), np.uint8)
    step = max(1, min(BLOCK_BYTES, memory) // source.row_bytes)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        block = source.read(begin, end)
        _require_finite(source, begin, block)
        rows[position[begin - first : end - first]] = to_e4m3(block)
    with atomic.written(path) as partial, open(partial, "wb") as file:
        file.write(rows.data)
    atomic.save(_numbers(path), numbers[order])
    return {"rows": last - first}


def write_feature_bucket(pieces: Sequence[Path], first: int, last: int, memory: int, target: RowOutput) -> Record:
    """Write rows ``first`` to ``last`` (exclusive), by new number, from the files of :func:`write_feature_piece`.

    Args:
        pieces: these files.
        memory: upper bound of the size of a block that is read, in bytes.

    Raises:
        DataError: the pieces lack one of these rows.
    """
    rows = np.empty((last - first, target.shape[1]), target.dtype)
    step = max(1, min(BLOCK_BYTES, memory) // target.row_bytes)
    found = 0
    for path in pieces:
        numbers = np.load(_numbers(path), mmap_mode="r")
        low, high = (int(index) for index in np.searchsorted(numbers, [first, last]))
        for begin in range(low, high, step):
            count = min(step, high - begin)
            block = np.fromfile(path, target.dtype, count * target.shape[1], offset=begin * target.row_bytes)
            rows[numbers[begin : begin + count] - first] = block.reshape(count, -1)
            found += count
    if found != len(rows):
        raise DataError(f"{pieces[0].parent} has {found} of {len(rows)} rows; prepare into an empty folder")
    target.write(first, rows)
    return {"rows": found}


def _require_finite(source: RawArray, first: int, block: NDArray[np.float32]) -> None:
    low, high = torch.aminmax(torch.from_numpy(block))
    if torch.isfinite(low) and torch.isfinite(high):
        return
    row, column = np.argwhere(~np.isfinite(block))[0]
    raise DataError(f"{source.path}: row {first + row:,} has the feature {block[row, column]} at {column}")


def _numbers(path: Path) -> Path:
    return path.with_name(f"{path.name}.numbers.npy")


@dataclass(frozen=True)
class TargetRange:
    """Targets ``first`` to ``last`` (exclusive). Their ``edges`` edges start at ``begin``."""

    first: int
    last: int
    begin: int
    edges: int


@dataclass(frozen=True)
class SortedEdges:
    """Edges of a part of a relation, sorted by target, in three files.

    Attributes:
        path: common prefix of the file names.
        targets: nodes of the target type.
    """

    path: Path
    targets: int

    @property
    def width(self) -> int:
        """Targets per bin."""
        return -(-self.targets // _BINS)

    def write(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Write edges with ascending targets."""
        firsts = bin_bounds(self.targets, self.width).astype(np.int32)
        bounds = np.searchsorted(targets, firsts).astype(np.int32)
        for name, values in (("sources", sources), ("targets", targets), ("bounds", bounds)):
            with atomic.written(self._file(name)) as partial, open(partial, "wb") as file:
                file.write(values.data)

    def bounds(self) -> NDArray[np.int32]:
        """Return the first edge of each bin, followed by the number of edges: [bins + 1]."""
        return np.fromfile(self._file("bounds"), np.int32)

    def read(self, first: int, last: int, block: int) -> Iterator[Pairs]:
        """Yield sources and targets of the edges into targets ``first`` to ``last`` (exclusive), which are whole bins.

        Each pair of arrays has at most ``block`` edges.
        """
        low, high = (
            int(np.fromfile(self._file("bounds"), np.int32, 1, offset=4 * -(-target // self.width))[0])
            for target in (first, last)
        )
        for begin in range(low, high, block):
            count = min(block, high - begin)
            sources, targets = (
                np.fromfile(self._file(name), np.int32, count, offset=4 * begin) for name in ("sources", "targets")
            )
            yield sources, targets

    def _file(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{name}")


def write_edge_piece(
    source: RawArray,
    permutations: Path,
    relation: Relation,
    first: int,
    last: int,
    forward: SortedEdges,
    backward: SortedEdges,
) -> Record:
    """Renumber edges ``first`` to ``last`` (exclusive); write them sorted by target and, reversed, by source.

    Self-loops of a relation between nodes of one type are removed.

    Raises:
        DataError: an edge has a node number that is out of range.
    """
    maps = [load_permutation(permutations, name) for name in (relation.source, relation.target)]
    ends = [np.empty(last - first, np.int32) for _ in maps]
    kept = 0
    for begin in range(first, last, BLOCK_EDGES):
        block = source.read(begin, min(begin + BLOCK_EDGES, last))
        for column, (name, numbers) in enumerate(zip((relation.source, relation.target), maps, strict=True)):
            _require_nodes(source, begin, block, column, name, len(numbers))
        if relation.symmetric:
            block = block[block[:, 0] != block[:, 1]]
        for column in range(2):
            ends[column][kept : kept + len(block)] = maps[column][block[:, column]]
        kept += len(block)
    sources, targets = (values[:kept] for values in ends)
    for sort, (here, there) in ((forward, (sources, targets)), (backward, (targets, sources))):
        order = stable_order(there, sort.targets)
        sort.write(here[order], there[order])
    return {"edges": kept}


def buckets(parts: Sequence[Sequence[SortedEdges]], loops: int, limit: int) -> list[TargetRange]:
    """Divide a relation's targets into ranges of whole bins.

    Args:
        parts: lists of the relation's sorted edge files; between nodes of one type a second list, with reversed edges.
        loops: number of self-loops that each target gets.
        limit: maximum of edges plus targets per range, except for a single bin that has more.
    """
    pieces = [piece for part in parts for piece in part]
    targets, width = pieces[0].targets, pieces[0].width
    bounds = bin_bounds(targets, width)
    before = loops * bounds  # number of edges before each bin
    for piece in pieces:
        before += piece.bounds()
    load = before + bounds
    found, low = [], 0
    while low < len(bounds) - 1:
        high = max(low + 1, int(np.searchsorted(load, load[low] + limit, side="right")) - 1)
        found.append(
            TargetRange(int(bounds[low]), int(bounds[high]), int(before[low]), int(before[high] - before[low]))
        )
        low = high
    return found


def bin_bounds(targets: int, width: int) -> NDArray[np.int64]:
    """Return the first target of each bin of ``width`` targets, followed by ``targets``: [bins + 1]."""
    return np.minimum(np.arange(-(-targets // width) + 1, dtype=np.int64) * width, targets)


def write_edge_bucket(
    parts: Sequence[Sequence[SortedEdges]],
    loops: bool,
    bucket: TargetRange,
    block: int,
    indptr: RowOutput,
    indices: RowOutput,
) -> Record:
    """Write rows of a relation's CSR matrix: the edges into the targets of ``bucket``, sorted by target.

    Args:
        parts: lists of the relation's sorted edge files; between nodes of one type a second list, with reversed edges.
        loops: whether each target gets a self-loop after the edges of each list.
        bucket: targets to write, and position and number of their edges in ``indices``.
        block: edges that are read at once.
        indptr, indices: outputs: the end of each target's edges, and the edges' sources.

    Returns:
        The number of written edges, as ``edges``.

    Raises:
        DataError: the files do not have ``bucket.edges`` edges.
    """
    streams = []
    for part in parts:
        streams += [piece.read(bucket.first, bucket.last, block) for piece in part]
        streams += [_loops(bucket.first, bucket.last)] if loops else []
    if bucket.last - bucket.first == 1:  # one target needs no sorting, and may exceed the memory
        count_written = 0
        for sources, _ in chain(*streams):
            indices.write(bucket.begin + count_written, sources)
            count_written += len(sources)
        ends = np.array([bucket.begin + count_written], np.int64)
    else:
        sources, targets = (np.empty(bucket.edges, np.int32) for _ in range(2))
        count_written = 0
        for some_sources, some_targets in chain(*streams):
            position = slice(count_written, count_written + len(some_sources))
            sources[position], targets[position] = some_sources, some_targets
            count_written = position.stop
        targets -= bucket.first
        count = bucket.last - bucket.first
        ends = bucket.begin + np.cumsum(np.bincount(targets[:count_written], minlength=count))
        indices.write(bucket.begin, sources[stable_order(targets, count)])
    if count_written != bucket.edges:
        raise DataError(f"{parts[0][0].path.parent} has {count_written} of {bucket.edges} edges; prepare afresh")
    indptr.write(bucket.first + 1, ends)
    return {"edges": count_written}


def stable_order(keys: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Return the indices that stably sort ``keys``, which are less than ``count``; radix sort with 16-bit digits."""
    order: NDArray[np.int64] = np.argsort(keys.astype(np.uint16), kind="stable")
    if count > 1 << _DIGIT:
        high = (keys >> _DIGIT).astype(np.uint16)[order]
        order = order[np.argsort(high, kind="stable")]
    return order


def _loops(first: int, last: int) -> Iterator[Pairs]:
    every = np.arange(first, last, dtype=np.int32)
    yield every, every


def _require_nodes(
    source: RawArray, first: int, block: NDArray[np.integer], column: int, name: str, nodes: int
) -> None:
    values = block[:, column]
    if values.min(initial=0) >= 0 and values.max(initial=0) < nodes:
        return
    row = int(np.flatnonzero((values < 0) | (values >= nodes))[0])
    raise DataError(
        f"{source.path}: row {first + row:,} has the {('source', 'target')[column]} {values[row]:,}, and there are "
        f"{nodes:,} nodes of type {name}"
    )
