"""Reference of :mod:`benchmarks.rgat.ops.projection`.

Tensors have the size of the capacities, so shapes are static. Unfilled entries are replaced by zeros where they could
reach a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock
from common.ops.triton_support import widen

MOST_COLUMNS = 256
"""Maximum columns of z in one program of our kernel; they are whole heads."""


class Projected(NamedTuple):
    """Projected rows, and their terms of the logits.

    Attributes:
        z_MD: rows times the weight of their relation; dtype of the weight.
        source_term_MA: terms that rows add to the logits of their edges; fp32 (fp64 for fp64).
    """

    z_MD: Tensor
    source_term_MA: Tensor


class Projection(NamedTuple):
    """Functions of an implementation.

    See :func:`project_reference`, :func:`weight_gradient_reference`, :func:`target_terms_reference`,
    :func:`target_terms_gradient_reference` and :func:`input_gradient_reference`.
    """

    project: Callable[..., Projected]
    weight_gradient: Callable[..., Tensor]
    target_terms: Callable[..., Tensor]
    target_terms_gradient: Callable[..., Tensor]
    input_gradient: Callable[..., Tensor]


def check_level(shape: BlockShape, level: int, x_NK: Tensor) -> None:
    """Check that inputs belong to a level.

    Raises:
        ValueError: the block has no such level, or the length of ``x_NK`` is not the level's capacity of nodes.
    """
    if not 1 <= level <= shape.hops:
        raise ValueError(f"level={level}, and the block has {shape.hops} hops")
    capacity = shape.node_offsets(level)[-1]
    if len(x_NK) != capacity:
        raise ValueError(f"inputs of {len(x_NK)} nodes, but level {level} holds at most {capacity}")


def check_parts(name: str, part: Tensor, capacity: int) -> None:
    """Check that a tensor of rows or targets belongs to a level.

    Raises:
        ValueError: it does not have ``capacity`` rows.
    """
    if len(part) != capacity:
        raise ValueError(f"{name} has {len(part)} rows, but at most {capacity} fit")


def _filled(capacity: int, count: Tensor) -> Tensor:
    """Return which of ``capacity`` entries are among the first ``count`` (0-d tensor): (capacity, 1)."""
    return (torch.arange(capacity, device=count.device) < count).unsqueeze(1)


def _rows(block: SampledBlock, level: int, relation: int) -> tuple[Tensor, Tensor]:
    """Return the node of each row of a relation, 0 for unfilled rows, and which rows are filled, (rows, 1)."""
    start, capacity = block.shape.row_offsets(block.shape.hops)[relation], block.shape.rows[level - 1][relation]
    filled = _filled(capacity, block.row_counts[level - 1, relation])
    return torch.where(filled.squeeze(1), block.rows[start : start + capacity], 0), filled


def _of_type(x_NK: Tensor, shape: BlockShape, level: int, node_type: int, hop: int | None = None) -> Tensor:
    """Return the inputs of a type's nodes; with ``hop`` only those within the capacity of that hop."""
    start = shape.node_offsets(level)[node_type]
    return x_NK[start : start + shape.nodes[level if hop is None else hop][node_type]]


def _gathered(x_nK: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a type's inputs; PyTorch cannot gather FP8."""
    if x_nK.dtype == torch.float8_e4m3fn:
        return x_nK.view(torch.uint8).index_select(0, index).view(x_nK.dtype).to(dtype)
    return x_nK.index_select(0, index).to(dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _source_term(z_MD: Tensor, att_Ad: Tensor) -> Tensor:
    return (widen(z_MD).unflatten(1, att_Ad.shape) * widen(att_Ad)).sum(2)


@torch.no_grad()
def project_reference(
    x_NK: Tensor, block: SampledBlock, level: int, weight_RKD: Tensor, att_source_RAd: Tensor
) -> Projected:
    """Project the rows of every relation.

    Args:
        x_NK: inputs of all nodes within ``level`` hops, by ``shape.node_offsets(level)``; float8_e4m3fn, fp16, bf16
            or fp32, converted to the weight's dtype before the product.
        level: level of the convolution, 1 to H.
        weight_RKD: fp16, bf16 or fp32.
        att_source_RAd: attention vectors; z times them, summed per head, is the source term; any dtype.

    Returns:
        Rows by ``shape.row_offsets(level)``; undefined beyond ``block.row_counts[level - 1]``.

    Raises:
        ValueError: the block has no such level, or ``x_NK`` belongs to another.
    """
    shape = block.shape
    check_level(shape, level, x_NK)
    parts = [weight_RKD.new_empty((0, weight_RKD.shape[2]))]
    terms = [torch.empty((0, att_source_RAd.shape[1]), dtype=_sum_dtype(weight_RKD), device=weight_RKD.device)]
    for relation, source in enumerate(shape.schema.sources):
        if shape.rows[level - 1][relation]:
            node, _ = _rows(block, level, relation)
            x_MK = _gathered(_of_type(x_NK, shape, level, source), node, weight_RKD.dtype)
            parts.append(x_MK @ weight_RKD[relation])
            terms.append(_source_term(parts[-1], att_source_RAd[relation]))
    return Projected(torch.cat(parts), torch.cat(terms))


@torch.no_grad()
def weight_gradient_reference(
    x_NK: Tensor, dz_MD: Tensor, block: SampledBlock, level: int, out_dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the weight of :func:`project_reference`.

    Args:
        x_NK, block, level: see :func:`project_reference`; the inputs are converted to the dtype of ``dz_MD``.
        dz_MD: gradient of z, including the gradient through the source term; unfilled rows may be undefined.

    Returns:
        (R, K, D); zeros for relations without rows.

    Raises:
        ValueError: the block has no such level, or a tensor belongs to another.
    """
    shape = block.shape
    check_level(shape, level, x_NK)
    check_parts("dz", dz_MD, shape.row_offsets(level)[-1])
    relations = len(shape.schema.relations)
    dw_RKD = torch.zeros((relations, x_NK.shape[1], dz_MD.shape[1]), dtype=out_dtype, device=dz_MD.device)
    for relation, source in enumerate(shape.schema.sources):
        if shape.rows[level - 1][relation]:
            node, filled = _rows(block, level, relation)
            x_MK = _gathered(_of_type(x_NK, shape, level, source), node, dz_MD.dtype)
            first, last = shape.row_offsets(level)[relation : relation + 2]
            product_KD = torch.where(filled, x_MK, 0).T @ torch.where(filled, dz_MD[first:last], 0)
            dw_RKD[relation] = product_KD.to(out_dtype)
    return dw_RKD


@torch.no_grad()
def target_terms_reference(x_NK: Tensor, block: SampledBlock, level: int, v_RKA: Tensor) -> Tensor:
    """Return the terms that targets add to the logits of their edges: x v, without projecting the targets.

    Args:
        v_RKA: for each relation and head, the head's columns of the weight times ``att_target``; any dtype.

    Returns:
        (T, A) by ``shape.target_offsets(level)``, fp32 (fp64 for fp64); undefined for targets beyond
        ``block.node_counts[level - 1]``.

    Raises:
        ValueError: the block has no such level, or ``x_NK`` belongs to another.
    """
    shape = block.shape
    check_level(shape, level, x_NK)
    terms = [torch.empty((0, v_RKA.shape[2]), dtype=_sum_dtype(v_RKA), device=v_RKA.device)]
    for relation, target in enumerate(shape.schema.targets):
        terms.append(_of_type(x_NK, shape, level, target, level - 1).to(terms[0].dtype) @ widen(v_RKA[relation]))
    return torch.cat(terms)


@torch.no_grad()
def target_terms_gradient_reference(x_NK: Tensor, dterm_TA: Tensor, block: SampledBlock, level: int) -> Tensor:
    """Return the gradient of ``v_RKA`` of :func:`target_terms_reference`.

    Args:
        dterm_TA: gradient of the terms, fp32; unfilled entries may be undefined.

    Returns:
        (R, K, A), fp32 (fp64 for fp64); zeros for relations without targets.

    Raises:
        ValueError: the block has no such level, or a tensor belongs to another.
    """
    shape = block.shape
    check_level(shape, level, x_NK)
    check_parts("dterm", dterm_TA, shape.target_offsets(level)[-1])
    found = []
    for relation, target in enumerate(shape.schema.targets):
        first, last = shape.target_offsets(level)[relation : relation + 2]
        filled = _filled(last - first, block.node_counts[level - 1, target])
        x_TK = _of_type(x_NK, shape, level, target, level - 1).to(dterm_TA.dtype)
        found.append(torch.where(filled, x_TK, 0).T @ torch.where(filled, dterm_TA[first:last], 0))
    return torch.stack(found)


@torch.no_grad()
def input_gradient_reference(
    dz_MD: Tensor, dterm_TA: Tensor, block: SampledBlock, level: int, weight_RKD: Tensor, v_RKA: Tensor
) -> Tensor:
    """Return the gradient of the inputs of :func:`project_reference` and :func:`target_terms_reference`.

    Args:
        dz_MD, dterm_TA: gradients of z, including the gradient through the source term, and of the target terms.
        level: 1 to H - 1; at level H the inputs are features, which need no gradient.
        weight_RKD, v_RKA: see these functions; the weight has the dtype of ``dz_MD``.

    Returns:
        (N, K), dtype of ``dz_MD``; undefined beyond ``block.node_counts[level]``.

    Raises:
        ValueError: there is no such level with gradients, or a tensor belongs to another.
    """
    shape = block.shape
    check_gradient_level(shape, level)
    check_parts("dz", dz_MD, shape.row_offsets(level)[-1])
    check_parts("dterm", dterm_TA, shape.target_offsets(level)[-1])
    size = (shape.node_offsets(level)[-1], weight_RKD.shape[1])
    dx_NK = torch.zeros(size, dtype=_sum_dtype(dz_MD), device=dz_MD.device)
    for relation, (source, target) in enumerate(zip(shape.schema.sources, shape.schema.targets, strict=True)):
        if shape.rows[level - 1][relation]:
            first, last = shape.row_offsets(level)[relation : relation + 2]
            start = shape.node_row_offsets[relation]
            own_NK = _of_type(dx_NK, shape, level, source)
            row = block.node_row[start : start + len(own_NK)]
            filled = _filled(len(own_NK), block.node_counts[level, source]).squeeze(1)
            found = filled & (row >= 0) & (row < block.row_counts[level - 1, relation])
            dz_ND = dz_MD[first:last].index_select(0, torch.where(found, row, 0))
            own_NK += torch.where(found.unsqueeze(1), dz_ND, 0) @ weight_RKD[relation].T
        first, last = shape.target_offsets(level)[relation : relation + 2]
        filled = _filled(last - first, block.node_counts[level - 1, target])
        own_NK = _of_type(dx_NK, shape, level, target, level - 1)
        own_NK += torch.where(filled, dterm_TA[first:last], 0) @ widen(v_RKA[relation]).T
    return dx_NK.to(dz_MD.dtype)


def check_gradient_level(shape: BlockShape, level: int) -> None:
    """Check that the inputs of a level have a gradient.

    Raises:
        ValueError: the block has no ``node_row`` for nodes at this level.
    """
    if not 1 <= level < shape.hops:
        raise ValueError(f"level={level}: inputs have gradients at levels 1 to {shape.hops - 1} of {shape.hops} hops")
