"""Products of a convolution's rows and targets by their definition, over filled entries alone, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops.projection.reference import Projection
from tests.benchmarks.rgat.random_blocks import Filled, filled


class Case(NamedTuple):
    """Inputs of all functions; NaN in unused rows."""

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
    nodes, _, rows, targets = (mask.cpu() for mask in filled(block, level))
    relations = len(block.shape.schema.relations)

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
    """Return the results in float64, only of used entries, in order."""

    z: Tensor
    source_term: Tensor
    weight_gradient: Tensor
    term: Tensor
    term_gradient: Tensor
    input_gradient: Tensor


def expected(case: Case) -> Expected:
    """Compute results by the definition and gradients by autograd."""
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
    there = Filled(*(mask.cpu() for mask in filled(block, level)))
    sums = (torch.cat(z) * case.dz_MD.cpu().double()[there.rows]).sum()
    sums = sums + (torch.cat(terms) * case.dterm_TA.cpu().double()[there.targets]).sum()
    dx, dweight, dv = torch.autograd.grad(sums, [x, weight, v])
    return Expected(
        *(part.detach() for part in (torch.cat(z), torch.cat(source_terms), dweight, torch.cat(terms), dv)),
        dx[there.nodes],
    )


def results(function: Projection, given: Case) -> dict[str, Tensor]:
    """Return all used rows of the level, by the names of the expected results."""
    block, level = given.block, given.level
    found = {}
    found["z"], found["source_term"] = function.project(
        given.x_NK, block, level, given.weight_RKD, given.att_source_RAd
    )
    found["weight_gradient"] = function.weight_gradient(given.x_NK, given.dz_MD, block, level, torch.float32)
    found["term"] = function.target_terms(given.x_NK, block, level, given.v_RKA)
    found["term_gradient"] = function.target_terms_gradient(given.x_NK, given.dterm_TA, block, level)
    if level < block.shape.hops:
        found["input_gradient"] = function.input_gradient(
            given.dz_MD, given.dterm_TA, block, level, given.weight_RKD, given.v_RKA
        )
    return found


def only_filled(found: dict[str, Tensor], given: Case) -> dict[str, Tensor]:
    """Return the used rows."""
    there = filled(given.block, given.level)
    masks = {"z": there.rows, "source_term": there.rows, "term": there.targets, "input_gradient": there.nodes}
    return {name: value[masks[name]] if name in masks else value for name, value in found.items()}


def assert_close(found: Tensor, formula: Tensor, tolerance: float, name: str = "") -> None:
    error = (found.cpu().double() - formula.cpu()).norm() / formula.norm()
    assert error < tolerance, f"{name}: relative error {error:.2e}"
