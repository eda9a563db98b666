"""Attention over edges target by target, in float64 with autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from common.ops.dropout.reference import DropoutMask, keep_mask
from tests.benchmarks.rgat.random_blocks import Inputs


def defined(
    inputs: Inputs,
    block: SampledBlock,
    level: int,
    slope: float,
    activation_slope: float | None,
    dropout: DropoutMask | None,
) -> tuple[Tensor, dict[tuple[int, int], Tensor], dict[str, Tensor]]:
    """Results of the operation's formula.

    Returns:
        (P, D), zeros beyond the nodes that exist. Logarithms of sums by place in T, (A,). The gradients for
        ``inputs.dout_PD``, by name.
    """
    shape, schema = block.shape, block.shape.schema
    heads, width = inputs.att_source_RAd.shape[1:]
    names = ("z_MD", "target_term_TA", "bias_RD", "att_source_RAd")
    leaves = {name: getattr(inputs, name).detach().double().clone().requires_grad_() for name in names}
    out_PD = [torch.zeros(heads * width, dtype=torch.float64) for _ in range(shape.node_offsets(level - 1)[-1])]
    log_sums = {}
    for kind, first in enumerate(shape.node_offsets(level - 1)[:-1]):
        for target in range(int(block.node_counts[level - 1, kind])):
            total_D = torch.zeros(heads * width, dtype=torch.float64)
            for relation in schema.into(kind):
                total_D = total_D + leaves["bias_RD"][relation]
                start = shape.edge_offsets[relation]
                targets = block.edge_target[start : start + int(block.edge_counts[level - 1, relation])]
                edges = (targets == target).nonzero()[:, 0] + start
                if not len(edges):
                    continue
                rows = block.edge_row[edges].long() + shape.row_offsets(level)[relation]
                place = shape.target_offsets(level)[relation] + target
                z_EAd = leaves["z_MD"][rows].unflatten(1, (heads, width))
                source_EA = (z_EAd * leaves["att_source_RAd"][relation]).sum(2)
                logit_EA = torch.nn.functional.leaky_relu(source_EA + leaves["target_term_TA"][place], slope)
                log_sums[relation, target] = logit_EA.logsumexp(0).detach()
                total_D = total_D + (logit_EA.softmax(0)[:, :, None] * z_EAd).sum(0).flatten()
            if activation_slope is not None:
                total_D = torch.nn.functional.leaky_relu(total_D, activation_slope)
            if dropout is not None:
                element = target * heads * width + torch.arange(heads * width)
                site = len(schema.types) * dropout.site + kind
                keep_D = keep_mask(dropout.seed, site, element, dropout.p)
                total_D = total_D * keep_D / (1 - dropout.p)
            out_PD[first + target] = total_D
    result_PD = torch.stack(out_PD)
    (result_PD * inputs.dout_PD.double().nan_to_num()).sum().backward()
    empty = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = {name: empty[name] if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return result_PD.detach(), log_sums, gradients
