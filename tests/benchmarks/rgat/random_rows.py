"""Blocks with nodes and rows drawn at random, without a sampler and without edges, and what their products are.

The formulas are over the nodes and rows that are filled, one relation after the other, in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock, Schema

GARBAGE = 2**31 - 1
"""Integer of what is not filled; floats are NaN there."""

SCHEMA = Schema.augmented(
    ("author", "paper", "venue"), ("paper__cites__paper", "paper__written_by__author", "paper__at__venue"), "paper"
)

ROOM = BlockShape(
    SCHEMA,
    nodes=((0, 11, 0), (16, 30, 4), (35, 50, 6), (45, 70, 7)),
    edges=((0,) * 5, (0,) * 5, (0,) * 5),
    rows=((20, 0, 0, 12, 4), (36, 20, 9, 33, 6), (50, 30, 20, 40, 7)),
)
"""Relations: cites, written_by, at, and the last two reversed; at level 1 only those into papers have room."""


def random_block(seed: int, shape: BlockShape = ROOM, *, full: bool = False, device: str = "cpu") -> SampledBlock:
    """Rows of any of the nodes that a level has, and at no level more rows than nodes.

    Args:
        seed: of what is drawn.
        shape: the room.
        full: whether all of it is filled; otherwise counts are anything from half of it, and one relation has no rows.
        device: of the result.
    """
    random = torch.Generator().manual_seed(seed)
    block = SampledBlock.empty(shape, torch.device("cpu"))
    for tensor in block.tensors().values():
        tensor.fill_(GARBAGE)

    def drawn(least: int, most: int) -> int:
        if full or least >= most:
            return most
        return int(torch.randint(max(least, most // 2), most + 1, (), generator=random))

    for node_type in range(len(shape.schema.types)):
        count = 0
        for hop in range(shape.hops + 1):
            count = drawn(count, shape.nodes[hop][node_type])
            block.node_counts[hop, node_type] = count
    for relation, source in enumerate(shape.schema.sources):
        first, into = shape.row_offsets(shape.hops)[relation], shape.node_row_offsets[relation]
        rows: list[int] = []
        for level in range(1, shape.hops + 1):
            nodes = int(block.node_counts[level, source])
            before = set(rows)
            others = [node for node in torch.randperm(nodes, generator=random).tolist() if node not in before]
            most = min(shape.rows[level - 1][relation], len(rows) + len(others))
            empty = not full and relation == len(shape.schema.relations) - 1
            rows += others[: 0 if empty else drawn(len(rows), most) - len(rows)]
            block.row_counts[level - 1, relation] = len(rows)
        block.rows[first : first + len(rows)] = torch.tensor(rows, dtype=torch.int32)
        known = int(block.node_counts[shape.hops - 1, source])
        block.node_row[into : into + known] = -1
        for row, node in enumerate(rows):
            if node < known:
                block.node_row[into + node] = row
    return SampledBlock.of(shape, {name: tensor.to(device) for name, tensor in block.tensors().items()})


class Filled(NamedTuple):
    """Which entries of the tensors of a level are filled: (N,), (M,), (T,)."""

    nodes: Tensor
    rows: Tensor
    targets: Tensor


def filled(block: SampledBlock, level: int) -> Filled:
    """Masks over the room."""
    shape = block.shape
    nodes, rows, targets = (
        torch.zeros(offsets[-1], dtype=torch.bool)
        for offsets in (shape.node_offsets(level), shape.row_offsets(level), shape.target_offsets(level))
    )
    for node_type, start in enumerate(shape.node_offsets(level)[:-1]):
        nodes[start : start + int(block.node_counts[level, node_type])] = True
    for relation, target in enumerate(shape.schema.targets):
        start = shape.row_offsets(level)[relation]
        rows[start : start + int(block.row_counts[level - 1, relation])] = True
        start = shape.target_offsets(level)[relation]
        targets[start : start + int(block.node_counts[level - 1, target])] = True
    return Filled(nodes, rows, targets)


class Case(NamedTuple):
    """Inputs of all functions; NaN in the room that is not filled."""

    block: SampledBlock
    level: int
    x_NK: Tensor
    weight_RKD: Tensor
    att_source_RAd: Tensor
    v_RKA: Tensor
    dz_MD: Tensor
    dterm_TA: Tensor


def case(
    block: SampledBlock, level: int, inputs: int, heads: int, head_size: int, x_dtype: torch.dtype, dtype: torch.dtype
) -> Case:
    """Values of order 1, and weights that keep them so."""
    random = torch.Generator().manual_seed(level)
    shape, (nodes, rows, targets) = block.shape, filled(block, level)
    relations = len(shape.schema.relations)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    device = block.counts.device
    found = Case(
        block,
        level,
        torch.where(nodes[:, None], normal(len(nodes), inputs), torch.nan).to(x_dtype),
        (normal(relations, inputs, heads * head_size) / inputs**0.5).to(dtype),
        (normal(relations, heads, head_size) / head_size**0.5).to(wide),
        (normal(relations, inputs, heads) / inputs**0.5).to(wide),
        torch.where(rows[:, None], normal(len(rows), heads * head_size), torch.nan).to(dtype),
        torch.where(targets[:, None], normal(len(targets), heads), torch.nan).to(wide),
    )
    return found._replace(**{name: getattr(found, name).to(device) for name in found._fields[2:]})


class Expected(NamedTuple):
    """Results in float64; of the entries that are filled, in order, where there is room for more."""

    z: Tensor
    source_term: Tensor
    weight_gradient: Tensor
    term: Tensor
    term_gradient: Tensor
    input_gradient: Tensor


def expected(case: Case) -> Expected:
    """By the definition and autograd."""
    block, level = case.block, case.level
    shape = block.shape
    x, weight, att, v = (
        getattr(case, name).cpu().double().requires_grad_()
        for name in ("x_NK", "weight_RKD", "att_source_RAd", "v_RKA")
    )
    rows, node_counts = block.rows.cpu(), block.node_counts.tolist()
    z, source_terms, terms = [], [], []
    for relation, (source, target) in enumerate(zip(shape.schema.sources, shape.schema.targets, strict=True)):
        count = int(block.row_counts[level - 1, relation])
        first = shape.row_offsets(shape.hops)[relation]
        node = shape.node_offsets(level)[source] + rows[first : first + count]
        z.append(x[node.long()] @ weight[relation])
        source_terms.append(torch.einsum("mad,ad->ma", z[-1].unflatten(1, att.shape[1:]), att[relation]))
        start = shape.node_offsets(level)[target]
        terms.append(x[start : start + node_counts[level - 1][target]] @ v[relation])
    there = filled(block, level)
    sums = (torch.cat(z) * case.dz_MD.cpu().double()[there.rows]).sum()
    sums = sums + (torch.cat(terms) * case.dterm_TA.cpu().double()[there.targets]).sum()
    dx, dweight, dv = torch.autograd.grad(sums, [x, weight, v])
    return Expected(
        *(part.detach() for part in (torch.cat(z), torch.cat(source_terms), dweight, torch.cat(terms), dv)),
        dx[there.nodes],
    )
