"""Files with the edges of a prepared graph, checked while a shard is read into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.rgat.graph import LARGEST, Schema
from benchmarks.rgat.prepared_names import indices_name, indptr_name
from benchmarks.rgat.stores.partition import Partition
from benchmarks.rgat.stores.row_loader import RowLoader
from common.data.direct_rows import DirectRows
from common.errors import DataError


class GraphFiles:
    """The two files of every relation. Construction checks all headers.

    Args:
        root: the prepared folder.
        nodes: number of nodes of each type.

    Attributes:
        edges: number of edges of each relation.

    Raises:
        DataError: a file is missing or damaged, or has another dtype or shape.
    """

    def __init__(self, root: Path, schema: Schema, nodes: tuple[int, ...]) -> None:
        self._root, self._schema, self._nodes = root, schema, nodes
        self.edges = tuple(self._count(number) for number in range(len(schema.relations)))

    def shard_edges(self, partition: Partition) -> list[tuple[int, ...]]:
        """Return the first edge of every shard of targets, followed by the number of edges: [R][S + 1].

        Raises:
            DataError: these offsets do not ascend from 0 to the number of edges.
        """
        return [self._cuts(number, partition) for number in range(len(self._schema.relations))]

    def read(
        self, partition: Partition, shard: int, indptr: Sequence[Tensor], indices: Sequence[Tensor], loader: RowLoader
    ) -> None:
        """Read a shard of targets.

        Args:
            shard: index of the shard.
            indptr: output, [R], int64, [rows_per_shard + 1].
            indices: output, [R], int32, with the lengths from :meth:`shard_edges`.
            loader: loader for the tensors' device.

        Raises:
            DataError: ``indptr`` does not ascend, or an edge has a source that does not exist.
        """
        cuts = self.shard_edges(partition)
        for number, target in enumerate(self._schema.targets):
            first, last = partition.share(target, shard)
            self._read_indptr(number, first, last, indptr[number], loader)
            self._read_indices(number, cuts[number][shard], cuts[number][shard + 1], indices[number], loader)

    def _count(self, number: int) -> int:
        """Return the number of edges of a relation."""
        with self._indptr(number), self._indices(number) as edges:
            return len(edges)

    def _indptr(self, number: int) -> DirectRows:
        relation, target = self._schema.relations[number], self._schema.targets[number]
        return DirectRows.from_npy(self._root / indptr_name(relation), torch.int64, (), self._nodes[target] + 1)

    def _indices(self, number: int) -> DirectRows:
        return DirectRows.from_npy(self._root / indices_name(self._schema.relations[number]), torch.int32, ())

    def _cuts(self, number: int, partition: Partition) -> tuple[int, ...]:
        path = self._root / indptr_name(self._schema.relations[number])
        target = self._schema.targets[number]
        places = [partition.share(target, shard)[0] for shard in range(partition.shards)] + [self._nodes[target]]
        found = np.load(path, mmap_mode="r")[places].tolist()  # a few numbers, each from another page
        if found[0] != 0 or found[-1] != self.edges[number] or sorted(found) != found:
            raise DataError(
                f"{path} goes from {found[0]:,} to {found[-1]:,} and not from 0 to the {self.edges[number]:,} edges of "
                f"{(self._root / indices_name(self._schema.relations[number])).name}, ascending; prepare it again"
            )
        return tuple(found)

    def _read_indptr(self, number: int, first: int, last: int, into: Tensor, loader: RowLoader) -> None:
        lowest = torch.zeros((), dtype=torch.int64, device=into.device)
        with self._indptr(number) as rows:
            for begin, end in loader.copy(rows, first, last + 1, into[: last + 1 - first]):
                steps = into[max(begin - 1, 0) : end].diff()
                if len(steps):
                    lowest = torch.minimum(lowest, steps.min())
        if int(lowest) < 0:
            path = self._root / indptr_name(self._schema.relations[number])
            raise DataError(f"{path} does not ascend among targets {first:,} to {last:,}; prepare it again")
        count = last - first
        into[count + 1 :] = into[count]  # entries beyond the type's last target have no edges
        into -= into[0].clone()

    def _read_indices(self, number: int, first: int, last: int, into: Tensor, loader: RowLoader) -> None:
        lowest = torch.zeros((), dtype=torch.int32, device=into.device)
        highest = torch.zeros_like(lowest)
        with self._indices(number) as rows:
            for begin, end in loader.copy(rows, first, last, into):
                low, high = into[begin:end].aminmax()
                lowest, highest = torch.minimum(lowest, low), torch.maximum(highest, high)
        source = self._schema.sources[number]
        wrong = int(lowest) if int(lowest) < 0 else int(highest)
        if not 0 <= wrong < min(self._nodes[source], LARGEST + 1):
            path = self._root / indices_name(self._schema.relations[number])
            raise DataError(
                f"{path} has an edge from node {wrong:,} of {self._schema.types[source]}, of which there are "
                f"{self._nodes[source]:,}; prepare it again"
            )
