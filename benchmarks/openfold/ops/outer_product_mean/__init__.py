"""Update of the pairs by the mean of outer products over an alignment.

``residual + (W vec(sum over s of a_si b_sj^T) + bias) / norm`` (Jumper et al. 2021, supplementary algorithm 10, lines 3
and 4, with the mean over the sequences that exist).

Shapes: B samples, S sequences, I J residues of a pair, C channels of a and of b, F = C C, Z channels of a pair. On a
rank of a split, I is a part of the residues.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import HALVES, triton_kernels, widen


def outer_product_mean_reference(
    residual_BIJZ: Tensor, a_BSIC: Tensor, b_BSJC: Tensor, norm_BIJ: Tensor, weight_ZF: Tensor, bias_Z: Tensor
) -> Tensor:
    """Return the updated pairs, (B, I, J, Z), in the dtype of the residual.

    The products are in the dtype of the activations, everything after them in fp32, or in fp64.

    Args:
        a_BSIC, b_BSJC: projections of the alignment, 0 where it does not exist.
        norm_BIJ: number of sequences that exist at both residues, plus an epsilon; fp32 or fp64.
        weight_ZF: columns count the channels of a, then those of b.
    """
    outer_BIJF = torch.einsum("bsic,bsjd->bijcd", a_BSIC, b_BSJC).flatten(3)
    update_BIJZ = widen(F.linear(outer_BIJF, weight_ZF)) + widen(bias_Z)
    return (widen(residual_BIJZ) + update_BIJZ / norm_BIJ.unsqueeze(3)).to(residual_BIJZ.dtype)


OUTER_PRODUCT_MEAN = Operation(
    "outer_product_mean",
    outer_product_mean_reference,
    {
        "triton": triton_kernels(
            "benchmarks.openfold.ops.outer_product_mean.triton:outer_product_mean",
            most={"channels": 64},
            multiple_of={"channels": 16},
            dtypes=HALVES,
        )
    },
    kernel_names=(("outer product mean", r"^outer_product_"),),
    cases="benchmarks.openfold.ops.outer_product_mean.cases",
)
"""Signature: ``outer_product_mean(residual_BIJZ, a_BSIC, b_BSJC, norm_BIJ, weight_ZF, bias_Z)``. Size of a request:
``channels`` (C)."""
