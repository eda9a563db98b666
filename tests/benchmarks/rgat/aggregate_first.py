"""The other way through a first convolution: features are summed as they are, for each head, and projected then.

A target's sum is linear in the rows: sum_e alpha_e (x[row(e)] W) = (sum_e alpha_e x[row(e)]) W, and the terms of the
logits are x (W a) in either case. So a relation projects sums of its targets, which are fewer than its rows, and every
column of W once. Sums are regrouped, so that results differ in rounding.

Shapes beyond those of the operation: N nodes within ``level`` hops, K their features; E edges, m rows and n targets of
a relation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops.edge_attention.reference import (
    RelationEdges,
    attention,
    biases,
    filled_nodes,
    finish,
    log_sums,
    logits_of,
    relations_at,
    sum_by_target,
)
from common.ops.dropout.reference import DropoutMask
from common.ops.triton_support import widen


def aggregate_first(
    x_NK: Tensor,
    block: SampledBlock,
    level: int,
    weight_RKD: Tensor,
    att_source_RAd: Tensor,
    att_target_RAd: Tensor,
    bias_RD: Tensor,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> Tensor:
    """A whole convolution, differentiable. Needs room for the features of a relation's edges.

    Args:
        x_NK: features of all nodes within ``level`` hops.
        block: its edges.
        level: of the convolution's inputs, 1 to H.
        weight_RKD: of the projections, for sources and targets alike; its dtype is that of the products.
        att_source_RAd, att_target_RAd: vectors of attention.
        bias_RD: of the relations.
        slope: of the leaky ReLU of the logits.
        activation_slope: of the leaky ReLU of the result; None without one.
        dropout: of the result, by type, node and column; None without one.

    Returns:
        (P, D), dtype of x, zeros beyond the nodes that exist.
    """
    wide_NK = torch.where(filled_nodes(block, level), widen(x_NK), 0.0)
    inputs, outputs = block.shape.node_offsets(level), block.shape.node_offsets(level - 1)
    out_PD = biases(bias_RD.to(wide_NK.dtype), block, level)
    for edges in relations_at(block, level):
        weight_KAd = weight_RKD[edges.relation].unflatten(1, att_source_RAd.shape[1:])
        source, target = (getattr(block.shape.schema, ends)[edges.relation] for ends in ("sources", "targets"))
        x_mK = wide_NK[inputs[source] : inputs[source + 1]].index_select(0, _row_nodes(block, level, edges.relation))
        x_nK = wide_NK[inputs[target] :][: outputs[target + 1] - outputs[target]]
        source_term_mA = x_mK @ _folded(weight_KAd, att_source_RAd[edges.relation], x_mK.dtype)
        target_term_nA = x_nK @ _folded(weight_KAd, att_target_RAd[edges.relation], x_nK.dtype)
        logit_EA = logits_of(source_term_mA, target_term_nA, edges)
        leaky_EA = torch.nn.functional.leaky_relu(logit_EA, slope)
        alpha_EA = attention(leaky_EA, log_sums(leaky_EA, edges), edges)
        sum_nD = _projected(_aggregated(x_mK, alpha_EA, edges), weight_KAd)
        before, own, after = out_PD.tensor_split((edges.nodes.start, edges.nodes.stop))
        out_PD = torch.cat([before, own + sum_nD, after])
    return finish(out_PD, block, level, activation_slope, dropout).to(x_NK.dtype)


def _row_nodes(block: SampledBlock, level: int, relation: int) -> Tensor:
    """[m]: node of each row, counted in its type; the first where there is no row."""
    first = block.shape.row_offsets(block.shape.hops)[relation]
    room = block.shape.rows[level - 1][relation]
    count = block.row_counts[level - 1, relation]
    nodes_m = block.rows[first : first + room]
    return torch.where(torch.arange(room, device=nodes_m.device) < count, nodes_m, 0).long()


def _folded(weight_KAd: Tensor, att_Ad: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight times vector of attention, (K, A)."""
    return (weight_KAd.to(dtype) * att_Ad.to(dtype)).sum(2)


def _aggregated(x_mK: Tensor, alpha_EA: Tensor, edges: RelationEdges) -> list[Tensor]:
    """For each head the sums of the features of each target's edges, weighted by the edges' shares, (n, K)."""
    x_EK = x_mK.index_select(0, edges.row_E)
    return [sum_by_target(alpha_E1 * x_EK, edges) for alpha_E1 in alpha_EA.split(1, 1)]


def _projected(sums_AnK: list[Tensor], weight_KAd: Tensor) -> Tensor:
    """Every head's sums times its columns of the weight, (n, D)."""
    blocks = [
        (sum_nK.to(weight_KAd.dtype) @ weight_KAd[:, head]).to(sum_nK.dtype) for head, sum_nK in enumerate(sums_AnK)
    ]
    return torch.cat(blocks, 1)
