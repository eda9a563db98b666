"""How far rounding can take attention over edges: every result is a sum, and what counts is the size of its terms.

Whatever the order in which n terms are added up, the error is at most about n * u times the sum of their absolute
values, u being half the dtype's epsilon; a rounding of every term adds u, one of the result another (N. J. Higham,
Accuracy and Stability of Numerical Algorithms, sections 3.1 and 4.2). A source of thousands of edges has results near 0
beside terms that add up to hundreds: neither its own size nor that of others bounds its error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rgat.block import Block
from benchmarks.rgat.ops.edge_attention.reference import (
    attention,
    forward_reference,
    logits_of,
    relations_at,
    sum_by_target,
    through_finish,
)
from common.ops.dropout.reference import DropoutMask

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.01 * 2**-7}
"""Of the sum of absolute terms: in bf16 gradients are rounded once before they are multiplied, and results once, by
2^-8 each; in fp32 a few hundred additions by 2^-24."""


def assert_within(found: Tensor, exact: Tensor, terms: Tensor, tolerance: float) -> None:
    """``found`` is off by no more than ``tolerance`` times the sum of absolute ``terms``, element by element."""
    assert found.isfinite().all()
    error = (found.double() - exact).abs()
    over = error > tolerance * terms
    if over.any():
        worst = (error / terms).nan_to_num().max().item()
        raise AssertionError(f"{int(over.sum())} of {over.numel()} elements, up to {worst:.2e} of their terms")


def forward_terms(
    z_MD: Tensor,
    source_term_MA: Tensor,
    target_term_TA: Tensor,
    bias_RD: Tensor,
    block: Block,
    level: int,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> Tensor:
    """(P, D), float64: sums of the absolute terms of the result; the activation makes no error larger."""
    return forward_reference(
        z_MD.double().abs(), source_term_MA.double(), target_term_TA.double(), bias_RD.double().abs(), block, level,
        slope=slope, activation_slope=None, dropout=dropout,
    )[0]  # fmt: skip


def backward_terms(
    dout_PD: Tensor,
    out_PD: Tensor,
    z_MD: Tensor,
    source_term_MA: Tensor,
    target_term_TA: Tensor,
    log_sum_TA: Tensor,
    att_source_RAd: Tensor,
    block: Block,
    level: int,
    *,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of dz_MD, dtarget_term_TA, dbias_RD and datt_source_RAd."""
    heads = source_term_MA.shape[1]
    source_term_MA, target_term_TA, log_sum_TA = (
        source_term_MA.double(), target_term_TA.double(), log_sum_TA.double()
    )  # fmt: skip
    gradient_PD = through_finish(dout_PD.double(), out_PD, block, level, activation_slope, dropout).abs()
    z_MD, att_source_RAd = z_MD.double().abs(), att_source_RAd.double().abs()
    dz_MD, dtarget_term_TA = torch.zeros_like(z_MD), torch.zeros_like(target_term_TA)
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
        dlogit_EA = alpha_EA * (dalpha_EA + mean_nA.index_select(0, edges.target_E))
        dlogit_EA *= torch.where(logit_EA > 0, 1.0, slope)
        dtarget_term_TA[edges.targets] = sum_by_target(dlogit_EA, edges)
        datt_source_RAd[edges.relation] = (z_EAd * dlogit_EA[:, :, None]).sum(0)
        of_edge_EAd = gradient_EAd * alpha_EA[:, :, None]
        of_edge_EAd += dlogit_EA[:, :, None] * att_source_RAd[edges.relation]
        dz_MD[edges.rows] = torch.zeros_like(z_MD[edges.rows]).index_add_(0, edges.row_E, of_edge_EAd.flatten(1))
    nodes = block.shape.node_offsets(level - 1)
    dbias_RD = torch.stack(
        [gradient_PD[nodes[target] : nodes[target + 1]].sum(0) for target in block.shape.schema.targets]
    )
    return dz_MD, dtarget_term_TA, dbias_RD, datt_source_RAd
