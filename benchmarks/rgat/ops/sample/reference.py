"""Interface of all samplers, and the reference: hop by hop. It waits for the device.

Shapes: H hops, R relations, S seeds, M targets of a hop, E edges, F fanout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.rgat.graph import LARGEST, BlockShape, Graph, SampledBlock
from common.ops.random_bits.reference import words

SITES = 16
"""Random words per node and relation, one for each slot; the maximum fanout."""

UNSEEN = LARGEST
"""Stamp of a node that no edge has reached. A numbered node has -1 - number, which is less than every position."""


class NeighborSampler(Protocol):
    """Sampler of blocks from one graph. All samplers of a graph share its stamps, so only one stream may use them."""

    def __call__(self, seeds: Tensor, count: Tensor | int, seed: Tensor) -> SampledBlock:
        """Return a new block around ``seeds``.

        Args:
            seeds: [S], int32: distinct nodes of the seed type.
            count: number of real seeds, which are the first ones, on the device or as a number; the rest is not read.
            seed: random seed, int64, one number on the device. Draws are a function of seed, relation, node and slot.
        """


def require_capacity(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> None:
    """Check that a sampler can serve these arguments.

    Raises:
        ValueError: fanouts are out of range or do not match the hops; the schema differs; a relation has capacity for
            edges but none for a node or row; or a tensor has more entries than int32 can number.
    """
    if len(fanouts) != shape.hops or not all(1 <= fanout <= SITES for fanout in fanouts):
        raise ValueError(f"fanouts={list(fanouts)}: one for each of {shape.hops} hops, 1 to {SITES}")
    if shape.schema != graph.schema:
        raise ValueError("the shape is one of another schema")
    for hop in range(shape.hops):
        for relation, source in enumerate(graph.schema.sources):
            capacity = min(shape.nodes[hop + 1][source], shape.rows[hop][relation])
            if shape.edges[hop][relation] > 0 and capacity < 1:
                name = graph.schema.relations[relation]
                raise ValueError(f"hop {hop + 1}: {name} has capacity for edges but none for rows")
    drawn = [
        sum(shape.nodes[hop][target] for target in graph.schema.targets) * fanout for hop, fanout in enumerate(fanouts)
    ]
    row_stamps = sum(shape.nodes[-1][source] for source in graph.schema.sources)
    most = max(*drawn, shape.edge_offsets[-1], shape.row_indptr_offsets[-1], row_stamps)
    if most > LARGEST:
        raise ValueError(f"{most:,} entries of a block are more than int32 numbers: take fewer seeds")


@dataclass
class _Sampled:
    """Sampled edges of a relation.

    Attributes:
        sources: sources of the edges, by hop, as nodes of the graph.
        edges: number of edges up to each hop.
    """

    sources: list[Tensor]
    edges: list[int]

    @property
    def last(self) -> int:
        """Number of edges so far."""
        return self.edges[-1] if self.edges else 0


class ReferenceSampler:
    """Reference sampler; see :class:`benchmarks.rgat.ops.sample.reference.NeighborSampler`."""

    def __init__(self, graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> None:
        require_capacity(graph, fanouts, shape)
        self._graph = graph
        self._fanouts = tuple(fanouts)
        self._shape = shape
        self._stamps = graph.stamps.split(list(graph.nodes))

    @torch.no_grad()
    def __call__(self, seeds: Tensor, count: Tensor | int, seed: Tensor) -> SampledBlock:
        graph, shape = self._graph, self._shape
        schema, offsets = shape.schema, shape.node_offsets(shape.hops)
        block = SampledBlock.empty(shape, graph.device)
        block.overflow.zero_()
        nodes = block.nodes.split([end - start for start, end in pairwise(offsets)])
        known = [0] * len(schema.types)
        known[schema.seed_type] = min(int(count), shape.seeds)
        first = seeds[: known[schema.seed_type]]
        nodes[schema.seed_type][: len(first)] = first
        self._stamps[schema.seed_type][first.long()] = -1 - torch.arange(
            len(first), dtype=torch.int32, device=graph.device
        )
        block.node_counts[0] = block.counts.new_tensor(known)
        expanded = [0] * len(schema.types)
        sampled = [_Sampled([], []) for _ in schema.relations]
        for hop in range(shape.hops):
            self._draw(hop, block, nodes, expanded, known, sampled, seed)
            expanded = known
            known = self._discover(hop, block, nodes, known, sampled)
        self._number_rows(block, expanded, sampled)
        for stamps, numbered, total in zip(self._stamps, nodes, known, strict=True):
            stamps[numbered[:total].long()] = UNSEEN
        return block

    def _draw(
        self,
        hop: int,
        block: SampledBlock,
        nodes: Sequence[Tensor],
        expanded: Sequence[int],
        known: Sequence[int],
        sampled: Sequence[_Sampled],
        seed: Tensor,
    ) -> None:
        """Draw the edges of the nodes that the last hop discovered: the ``known`` ones beyond ``expanded``."""
        shape, schema, fanout = self._shape, self._shape.schema, self._fanouts[hop]
        targets = [nodes[target][expanded[target] : known[target]].long() for target in schema.targets]
        spans = [self._span(relation, each) for relation, each in enumerate(targets)]
        sizes = [len(each) for each in targets]
        degree_M = torch.cat([degree for _, degree in spans])
        site_M = torch.cat(
            [each.new_full((1,), SITES * number).expand(len(each)) for number, each in enumerate(targets)]
        )
        pick_MF = _floyd(torch.cat(targets), degree_M, site_M, fanout, seed)
        take_M = degree_M.clamp(max=fanout)
        there_MF = torch.arange(fanout, device=pick_MF.device) < take_M[:, None]
        for relation, (pick, there, take) in enumerate(
            zip(pick_MF.split(sizes), there_MF.split(sizes), take_M.split(sizes), strict=True)
        ):
            target, capacity = schema.targets[relation], shape.edges[hop][relation]
            before, wanted = sampled[relation].last, sampled[relation].last + int(take.sum())
            now = min(wanted, capacity)
            if wanted > capacity:
                block.overflow.fill_(1)
            indptr = block.indptr[shape.indptr_offsets[relation] :]
            indptr[expanded[target]] = before
            indptr[expanded[target] + 1 : known[target] + 1] = (before + take.cumsum(0)).clamp(max=capacity)
            drawn = there.flatten().nonzero().flatten()[: now - before]
            index = drawn // fanout
            position = spans[relation][0].index_select(0, index) + pick.flatten().index_select(0, drawn)
            start = shape.edge_offsets[relation]
            block.edge_target[start + before : start + now] = expanded[target] + index
            sampled[relation].sources.append(
                self._sources(relation, targets[relation].index_select(0, index), position)
            )
            sampled[relation].edges.append(now)
        block.edge_counts[hop] = block.counts.new_tensor([each.last for each in sampled])

    def _span(self, relation: int, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first edge of each target in its shard, and the number of its edges; int64."""
        per_shard, shards = self._graph.targets_per_shard[relation], self._graph.indptr[relation]
        if len(shards) == 1:
            first = _read(shards[0], targets)
            return first, _read(shards[0], targets + 1) - first
        shard, index = targets // per_shard, targets % per_shard
        first, end = torch.zeros_like(targets), torch.zeros_like(targets)
        for number, indptr in enumerate(shards):
            here = shard == number
            first[here] = _read(indptr, index[here])
            end[here] = _read(indptr, index[here] + 1)
        return first, end - first

    def _sources(self, relation: int, targets: Tensor, position: Tensor) -> Tensor:
        """Return the sources of the edges at ``position`` in the shards of their targets: [E]."""
        if self._graph.shards == 1:
            return _read(self._graph.indices[relation][0], position).long()
        shard = targets // self._graph.targets_per_shard[relation]
        sources = torch.empty_like(position)
        for number, indices in enumerate(self._graph.indices[relation]):
            here = shard == number
            sources[here] = _read(indices, position[here]).long()
        return sources

    def _discover(
        self, hop: int, block: SampledBlock, nodes: Sequence[Tensor], known: Sequence[int], sampled: Sequence[_Sampled]
    ) -> list[int]:
        """Number the sources that the hop reached first, in the order of the edges that reached them."""
        shape, now = self._shape, list(known)
        for number, (stamps, numbered) in enumerate(zip(self._stamps, nodes, strict=True)):
            reached = [
                each.sources[hop]
                for each, source in zip(sampled, shape.schema.sources, strict=True)
                if source == number
            ]
            sources = torch.cat([numbered.new_empty(0, dtype=torch.int64), *reached])
            position = torch.arange(len(sources), dtype=torch.int32, device=sources.device)
            stamps.scatter_reduce_(0, sources, position, "amin")
            new = sources.index_select(0, (stamps.index_select(0, sources) == position).nonzero().flatten())
            stamps[new] = UNSEEN
            fits = new[: shape.nodes[hop + 1][number] - known[number]]
            now[number] += len(fits)
            if len(fits) < len(new):
                block.overflow.fill_(1)
            numbered[known[number] : now[number]] = fits.to(numbered)
            stamps[fits] = -1 - torch.arange(known[number], now[number], dtype=torch.int32, device=sources.device)
        block.node_counts[hop + 1] = block.counts.new_tensor(now)
        return now

    def _number_rows(self, block: SampledBlock, inner: Sequence[int], sampled: Sequence[_Sampled]) -> None:
        """Write the rows of all relations; ``inner`` has the number of nodes of each type within H - 1 hops."""
        shape, schema = self._shape, self._shape.schema
        counts = [[0] * len(schema.relations) for _ in range(shape.hops)]
        for relation, (source, each) in enumerate(zip(schema.sources, sampled, strict=True)):
            local = torch.cat([self._local(source, hop, found) for hop, found in enumerate(each.sources)])
            position = torch.arange(len(local), device=local.device)
            first_of = torch.full((shape.nodes[-1][source],), UNSEEN, dtype=torch.int64, device=local.device)
            first_of.scatter_reduce_(0, local, position, "amin")
            first = first_of.index_select(0, local)
            opens = first == position
            number = opens.cumsum(0) - 1
            capacity_E = torch.cat(
                [
                    position.new_full((end - start,), shape.rows[hop][relation])
                    for hop, (start, end) in enumerate(pairwise([0, *each.edges]))
                ]
            )
            total = [int(number[end - 1]) + 1 if end else 0 for end in each.edges]
            for hop, rows in enumerate(total):
                counts[hop][relation] = min(rows, shape.rows[hop][relation])
                if rows > shape.rows[hop][relation]:
                    block.overflow.fill_(1)
            rows, start = counts[-1][relation], shape.edge_offsets[relation]
            edge_row = torch.minimum(number.index_select(0, first), capacity_E - 1)
            block.edge_row[start : start + each.last] = edge_row
            begin = shape.row_offsets(shape.hops)[relation]
            block.rows[begin : begin + rows] = local.index_select(0, opens.nonzero().flatten()[:rows])
            reached = first_of[: inner[source]]
            there = (reached != UNSEEN).nonzero().flatten()
            row = number.index_select(0, reached.index_select(0, there))
            begin = shape.node_row_offsets[relation]
            node_row = block.node_row[begin : begin + len(reached)].fill_(-1)
            node_row[there] = row.where(row < rows, -1).to(node_row)
            block.row_edges[start : start + each.last] = edge_row.to(torch.int32).sort(stable=True).indices
            begin = shape.row_indptr_offsets[relation]
            block.row_indptr[begin] = 0
            block.row_indptr[begin + 1 : begin + rows + 1] = edge_row.bincount(minlength=rows).cumsum(0)
        block.row_counts.copy_(block.counts.new_tensor(counts))

    def _local(self, source: int, hop: int, sources: Tensor) -> Tensor:
        """Return the number of each source of a hop in its type, [E], int64; clamped to the capacity."""
        stamp = self._stamps[source].index_select(0, sources).long()
        capacity = self._shape.nodes[hop + 1][source]
        return torch.where(stamp < 0, -1 - stamp, capacity - 1).clamp(max=capacity - 1)


def _read(shard: Tensor, index: Tensor) -> Tensor:
    """Return entries of a shard, on the device of ``places``."""
    return shard.index_select(0, index.to(shard.device)).to(index.device)


def _floyd(node_M: Tensor, degree_M: Tensor, site_M: Tensor, fanout: int, seed: Tensor) -> Tensor:
    """Return distinct positions among the edges of each node, [M, F], int64.

    R. W. Floyd's sampling (CACM 30 (9), 1987). A node with no more edges than the fanout takes all in order; slots
    beyond them are undefined.
    """
    slot_F = torch.arange(fanout, device=node_M.device)
    pick_MF = slot_F.expand(len(node_M), fanout).clone()
    many = (degree_M > fanout).nonzero(as_tuple=True)[0]
    last_MF = degree_M[many, None] - fanout + slot_F
    bits_MF = words(node_M[many, None], seed, site_M[many, None] + slot_F).long() & 0xFFFFFFFF
    draw_MF = (bits_MF * (last_MF + 1)) >> 32
    for slot in range(1, fanout):
        taken = (draw_MF[:, :slot] == draw_MF[:, slot : slot + 1]).any(1)
        draw_MF[:, slot] = torch.where(taken, last_MF[:, slot], draw_MF[:, slot])
    pick_MF[many] = draw_MF
    return pick_MF


def sampler_reference(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> ReferenceSampler:
    """Return a sampler in plain PyTorch, for any device.

    Raises:
        ValueError: see :func:`benchmarks.rgat.ops.sample.reference.require_capacity`.
    """
    return ReferenceSampler(graph, fanouts, shape)
