"""Random blocks for tests of operations, and inputs around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock, Schema
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import largest_shape
from benchmarks.rgat.synthetic import synthetic_graph

EMPTY = SampledBlock.empty
SCHEMA = Schema.augmented(
    ("paper", "author", "topic"), ("paper__cites__paper", "paper__by__author", "paper__on__topic"), "paper"
)
"""Five relations, three of them into papers."""


def random_block(
    seed: int = 0,
    *,
    schema: Schema = SCHEMA,
    graph: int = 30,
    seeds: int = 4,
    fanouts: tuple[int, ...] = (3, 2, 3),
    without: tuple[int, ...] = (),
    slack: int = 3,
    shape: BlockShape | None = None,
) -> SampledBlock:
    """A block of the reference sampler in a graph of ``graph`` nodes of each type, with garbage in unused entries.

    Some targets have no edges, and some edges come twice.

    Args:
        without: relations without an edge.
        slack: unused entries.
        shape: capacities, instead of ``slack``.
    """
    degrees = {str(relation): 1.7 for number, relation in enumerate(schema.relations) if number not in without}
    made = synthetic_graph(schema, (graph,) * len(schema.types), degrees, seed, torch.device("cpu"))
    papers = torch.randperm(graph, generator=torch.Generator().manual_seed(seed))[:seeds].int()

    def sampled(shape: BlockShape) -> SampledBlock:
        return sampler_reference(made, fanouts, shape)(papers, seeds, torch.tensor(seed))

    if shape is None:
        whole = sampled(largest_shape(made, seeds, fanouts))
        nodes, edges, rows = (
            tuple(tuple(count + slack for count in line) for line in counts.tolist())
            for counts in (whole.node_counts, whole.edge_counts, whole.row_counts)
        )
        shape = BlockShape(schema, (tuple(whole.node_counts[0].tolist()), *nodes[1:]), edges, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampledBlock, "empty", garbage)
        block = sampled(shape)
    assert not block.overflow
    return block


def garbage(shape: BlockShape, device: torch.device) -> SampledBlock:
    """A block with a number in all entries that none of its nodes, edges or rows has."""
    tensors = EMPTY(shape, device).tensors()
    return SampledBlock(shape, **{name: torch.full_like(tensor, 1 << 30) for name, tensor in tensors.items()})


@dataclass
class Inputs:
    """Tensors of one convolution; NaN wherever a block fills nothing."""

    z_MD: Tensor
    source_term_MA: Tensor
    target_term_TA: Tensor
    bias_RD: Tensor
    att_source_RAd: Tensor
    dout_PD: Tensor


class Filled(NamedTuple):
    """Used entries of the tensors of a level, bool."""

    nodes: Tensor
    outputs: Tensor
    rows: Tensor
    targets: Tensor


def filled(block: SampledBlock, level: int) -> Filled:
    """Masks over the nodes within ``level`` and within ``level - 1`` hops, of rows and of targets."""
    shape, targets = block.shape, list(block.shape.schema.targets)
    inner, counts = shape.nodes[level - 1], block.node_counts[level - 1]

    def mask(capacities: Iterable[int], counts: Tensor) -> Tensor:
        exists = [
            torch.arange(capacity, device=counts.device) < count
            for capacity, count in zip(capacities, counts, strict=True)
        ]
        return torch.cat(exists)

    return Filled(
        mask(shape.nodes[level], block.node_counts[level]),
        mask(inner, counts),
        mask(shape.rows[level - 1], block.row_counts[level - 1]),
        mask([inner[target] for target in targets], counts[targets]),
    )


def random_inputs(
    block: SampledBlock, level: int, heads: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    """Inputs for a block on the CPU. Terms belong to z and the vectors of attention."""
    random = torch.Generator().manual_seed(seed)
    shape = block.shape
    relations = len(shape.schema.relations)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    z_MD, dout_PD = (
        normal(shape.row_offsets(level)[-1], heads * width),
        normal(shape.node_offsets(level - 1)[-1], heads * width),
    )
    att_source_RAd, target_term_TA = normal(relations, heads, width), normal(shape.target_offsets(level)[-1], heads)
    z_MD = z_MD.to(dtype).double()
    att_of_row = att_source_RAd.repeat_interleave(torch.tensor(shape.rows[level - 1]), 0)
    source_term_MA = (z_MD.unflatten(1, (heads, width)) * att_of_row).sum(2)
    there = filled(block, level)
    for tensor, exists in (
        (z_MD, there.rows),
        (source_term_MA, there.rows),
        (target_term_TA, there.targets),
        (dout_PD, there.outputs),
    ):
        tensor[~exists] = torch.nan
    terms = torch.promote_types(dtype, torch.float32)
    return Inputs(
        z_MD.to(dtype), source_term_MA.to(terms), target_term_TA.to(terms), normal(relations, heads * width).to(terms),
        att_source_RAd.to(terms), dout_PD.to(dtype),
    )  # fmt: skip
