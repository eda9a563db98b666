"""Reference of edge attention, with the shapes of :mod:`benchmarks.rgat.ops.edge_attention`.

Also: E edges, m rows and n targets of a relation. Tensors have the size of the capacities, and unfilled entries are
masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from common.ops.dropout.reference import DropoutMask, keep_rows, scale_of_kept
from common.ops.triton_support import widen


class EdgeAttention(NamedTuple):
    """Functions of an implementation; see :func:`forward_reference` and :func:`backward_reference`."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


class RelationEdges(NamedTuple):
    """Edges of a relation at a level.

    Attributes:
        relation: index of the relation.
        exists_E: bool, whether the edge is filled.
        row_E, target_E: row in the relation, and target in its type; 0 for unfilled edges.
        first_n1: [n + 1], first edge of each target; unfilled targets have no edges.
        rows: slice of the relation in a tensor of all rows at the level.
        targets: slice of the relation in a tensor of all relations' targets at the level.
        nodes: slice of its targets in a tensor of all output nodes.
    """

    relation: int
    exists_E: Tensor
    row_E: Tensor
    target_E: Tensor
    first_n1: Tensor
    rows: slice
    targets: slice
    nodes: slice


def relations_at(block: SampledBlock, level: int) -> Iterator[RelationEdges]:
    """Yield the relations with nonzero capacity at ``level``."""
    shape = block.shape
    row_start, target_start = shape.row_offsets(level), shape.target_offsets(level)
    node_start = shape.node_offsets(level - 1)
    for relation, capacity in enumerate(shape.edges[level - 1]):
        target = shape.schema.targets[relation]
        count = block.edge_counts[level - 1, relation]
        targets = target_start[relation + 1] - target_start[relation]
        if not (capacity and targets and row_start[relation + 1] > row_start[relation]):
            continue
        exists_E = torch.arange(capacity, device=count.device) < count
        edges = slice(shape.edge_offsets[relation], shape.edge_offsets[relation] + capacity)
        first = shape.indptr_offsets[relation]
        filled_n1 = torch.arange(targets + 1, device=count.device) <= block.node_counts[level - 1, target]
        first_n1 = torch.where(filled_n1, block.indptr[first : first + targets + 1], count).minimum(count)
        yield RelationEdges(
            relation,
            exists_E,
            torch.where(exists_E, block.edge_row[edges], 0).long(),
            torch.where(exists_E, block.edge_target[edges], 0).long(),
            first_n1.long(),
            slice(row_start[relation], row_start[relation + 1]),
            slice(target_start[relation], target_start[relation + 1]),
            slice(node_start[target], node_start[target + 1]),
        )


def sum_by_target(values_E: Tensor, edges: RelationEdges) -> Tensor:
    """Return sums over each target's edges, (n, ...); values of unfilled edges are not read."""
    return torch.segment_reduce(values_E, "sum", offsets=edges.first_n1, axis=0, unsafe=True)


def _sum_by_row(values_E: Tensor, row_E: Tensor, rows: int, deterministic: bool) -> Tensor:
    """Return sums over each row's edges, (rows, ...)."""
    sums = values_E.new_zeros((rows, *values_E.shape[1:]))
    if deterministic and values_E.is_cuda:  # index_add_ uses atomics on GPUs
        return sums.index_put_((row_E,), values_E, accumulate=True)
    return sums.index_add_(0, row_E, values_E)


def filled_nodes(block: SampledBlock, hop: int) -> Tensor:
    """Return which nodes within ``hop`` hops exist, (nodes, 1)."""
    capacities, counts = block.shape.nodes[hop], block.node_counts[hop]
    exists = [
        torch.arange(capacity, device=counts.device) < count for capacity, count in zip(capacities, counts, strict=True)
    ]
    return torch.cat(exists)[:, None]


def logits_of(source_term_mA: Tensor, target_term_nA: Tensor, edges: RelationEdges) -> Tensor:
    """Return the sum of both terms of a relation's edges, (E, A); 0 for unfilled edges."""
    sum_EA = source_term_mA.index_select(0, edges.row_E) + target_term_nA.index_select(0, edges.target_E)
    return torch.where(edges.exists_E[:, None], sum_EA, 0.0)


def log_sums(leaky_EA: Tensor, edges: RelationEdges) -> Tensor:
    """Return the logarithm of the sum of exponentials over each target's edges, (n, A); -inf without edges."""
    highest_nA = torch.segment_reduce(leaky_EA, "max", offsets=edges.first_n1, axis=0, unsafe=True).detach()
    shift_EA = highest_nA.index_select(0, edges.target_E)
    shift_EA = torch.where(edges.exists_E[:, None], shift_EA, 0.0)
    return highest_nA + sum_by_target((leaky_EA - shift_EA).exp(), edges).log()


def attention(leaky_EA: Tensor, log_sum_nA: Tensor, edges: RelationEdges) -> Tensor:
    """Return the attention weights of the edges, (E, A); 0 for unfilled edges."""
    exists_E1 = edges.exists_E[:, None]
    shift_EA = torch.where(exists_E1, log_sum_nA.index_select(0, edges.target_E), 0.0)
    return torch.where(exists_E1, (leaky_EA - shift_EA).exp(), 0.0)


def biases(bias_RD: Tensor, block: SampledBlock, level: int) -> Tensor:
    """Return the sum of the biases of all relations into each node's type, (P, D)."""
    capacities, schema = block.shape.nodes[level - 1], block.shape.schema
    nothing_D = torch.zeros_like(bias_RD[0])
    sums = [sum((bias_RD[relation] for relation in schema.into(kind)), nothing_D) for kind in range(len(capacities))]
    return torch.cat([sum_D.expand(capacity, -1) for sum_D, capacity in zip(sums, capacities, strict=True)])


def finish(
    sum_PD: Tensor, block: SampledBlock, level: int, activation_slope: float | None, dropout: DropoutMask | None
) -> Tensor:
    """Return activation and dropout of the sums over all relations, (P, D), with zeros in unfilled nodes.

    Args:
        activation_slope: slope of the leaky ReLU below 0; None for no activation.
        dropout: dropout after the activation; None for no dropout.
    """
    if activation_slope is not None:
        sum_PD = torch.nn.functional.leaky_relu(sum_PD, activation_slope)
    if dropout is not None and dropout.p:
        sum_PD = torch.where(_kept(sum_PD, block, level, dropout), sum_PD * scale_of_kept(dropout.p), 0.0)
    return torch.where(filled_nodes(block, level - 1), sum_PD, 0.0)


def _kept(x_PD: Tensor, block: SampledBlock, level: int, dropout: DropoutMask) -> Tensor:
    """Return which elements dropout keeps, (P, D). It depends on type, node and column, but not on capacities.

    With T types, type t has the site T * site + t.
    """
    capacities = block.shape.nodes[level - 1]
    kept = [
        keep_rows(
            dropout.seed,
            dropout.site * len(capacities) + kind,
            torch.arange(capacity, device=x_PD.device),
            x_PD.shape[1],
            dropout.p,
        )
        for kind, capacity in enumerate(capacities)
    ]
    return torch.cat(kept)


@torch.no_grad()
def forward_reference(
    z_MD: Tensor,
    source_term_MA: Tensor,
    target_term_TA: Tensor,
    bias_RD: Tensor,
    block: SampledBlock,
    level: int,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> tuple[Tensor, Tensor]:
    """Compute the forward pass.

    Args:
        z_MD: projected rows.
        source_term_MA, target_term_TA: terms of the logits, fp32.
        level: level of the rows, 1 to H.
        slope: slope of the leaky ReLU of the logits, 0 to 1.
        activation_slope: slope of the leaky ReLU of the result; None: no leaky ReLU.
        dropout: dropout of the result, by type, node and column; None: no dropout.

    Returns:
        (P, D), in the dtype of z, zeros in unfilled entries. (T, A), fp32: for each relation and target, the
        logarithm of the sum of its edges' exponentials; undefined where it has no edge.
    """
    dtype, z_MD = z_MD.dtype, widen(z_MD)
    heads = source_term_MA.shape[1]
    out_PD = biases(bias_RD.to(z_MD.dtype), block, level)
    log_sum_TA = torch.full_like(target_term_TA, -torch.inf, dtype=z_MD.dtype)
    for edges in relations_at(block, level):
        logit_EA = logits_of(source_term_MA[edges.rows], target_term_TA[edges.targets], edges)
        leaky_EA = torch.nn.functional.leaky_relu(logit_EA, slope)
        log_sum_TA[edges.targets] = log_sum_nA = log_sums(leaky_EA, edges)
        alpha_EA = attention(leaky_EA, log_sum_nA, edges)
        z_EAd = z_MD[edges.rows].index_select(0, edges.row_E).unflatten(1, (heads, -1))
        out_PD[edges.nodes] += sum_by_target((alpha_EA[:, :, None] * z_EAd).flatten(1), edges)
    return finish(out_PD, block, level, activation_slope, dropout).to(dtype), log_sum_TA


def through_finish(
    dout_PD: Tensor,
    out_PD: Tensor,
    block: SampledBlock,
    level: int,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> Tensor:
    """Return the gradient of the sums over all relations, (P, D), at least fp32; zeros in unfilled entries."""
    gradient_PD = widen(dout_PD)
    if dropout is not None and dropout.p:
        kept_PD = _kept(gradient_PD, block, level, dropout)
        gradient_PD = torch.where(kept_PD, gradient_PD * scale_of_kept(dropout.p), 0.0)
    if activation_slope is not None:  # the sign of dropped elements is lost, but their gradient is 0
        gradient_PD = torch.where(out_PD > 0, gradient_PD, gradient_PD * activation_slope)
    return torch.where(filled_nodes(block, level - 1), gradient_PD, 0.0)


@torch.no_grad()
def backward_reference(
    dout_PD: Tensor,
    out_PD: Tensor,
    z_MD: Tensor,
    source_term_MA: Tensor,
    target_term_TA: Tensor,
    log_sum_TA: Tensor,
    att_source_RAd: Tensor,
    block: SampledBlock,
    level: int,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the backward pass. Arguments not listed are those of :func:`forward_reference`.

    Args:
        dout_PD: gradient of the result, dtype of z.
        out_PD, log_sum_TA: results of forward.
        att_source_RAd: attention vectors; ``source_term_MA`` is the sum over each head of z times them.
        deterministic: whether results must be bitwise reproducible.

    Returns:
        dz_MD: dtype of z, includes the gradient through ``source_term_MA``; undefined in unfilled rows.
        dtarget_term_TA: fp32, zeros in unfilled targets. dbias_RD and datt_source_RAd: fp32.
    """
    dtype = z_MD.dtype
    z_MD, att_source_RAd = widen(z_MD), widen(att_source_RAd)
    heads = source_term_MA.shape[1]
    gradient_PD = through_finish(dout_PD, out_PD, block, level, activation_slope, dropout)
    dz_MD = torch.zeros_like(z_MD)
    dtarget_term_TA = torch.zeros_like(target_term_TA, dtype=z_MD.dtype)
    datt_source_RAd = torch.zeros_like(att_source_RAd)
    for edges in relations_at(block, level):
        logit_EA = logits_of(source_term_MA[edges.rows], target_term_TA[edges.targets], edges)
        leaky_EA = torch.nn.functional.leaky_relu(logit_EA, slope)
        alpha_EA = attention(leaky_EA, log_sum_TA[edges.targets], edges)
        z_EAd = z_MD[edges.rows].index_select(0, edges.row_E).unflatten(1, (heads, -1))
        z_EAd.masked_fill_(~edges.exists_E[:, None, None], 0.0)
        gradient_EAd = gradient_PD[edges.nodes].index_select(0, edges.target_E).unflatten(1, (heads, -1))
        dalpha_EA = (gradient_EAd * z_EAd).sum(2)
        mean_nA = sum_by_target(alpha_EA * dalpha_EA, edges)
        dleaky_EA = alpha_EA * (dalpha_EA - mean_nA.index_select(0, edges.target_E))
        dlogit_EA = torch.where(logit_EA > 0, dleaky_EA, dleaky_EA * slope)
        dtarget_term_TA[edges.targets] = sum_by_target(dlogit_EA, edges)
        datt_source_RAd[edges.relation] = z_EAd.mul_(dlogit_EA[:, :, None]).sum(0)
        dz_EAd = gradient_EAd.mul_(alpha_EA[:, :, None])
        rows = edges.rows.stop - edges.rows.start
        dz_mD = _sum_by_row(dz_EAd.flatten(1), edges.row_E, rows, deterministic)
        dsource_term_mA = _sum_by_row(dlogit_EA, edges.row_E, rows, deterministic)
        through_term_mAd = dsource_term_mA[:, :, None] * att_source_RAd[edges.relation]
        dz_MD[edges.rows] = dz_mD + through_term_mAd.flatten(1)
    nodes = block.shape.node_offsets(level - 1)
    sums = [gradient_PD[nodes[target] : nodes[target + 1]].sum(0) for target in range(len(nodes) - 1)]
    dbias_RD = torch.stack([sums[target] for target in block.shape.schema.targets])
    return dz_MD.to(dtype), dtarget_term_TA, dbias_RD, datt_source_RAd
