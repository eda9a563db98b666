"""LayerNorm without weights, then scale and shift of each sample: ``y = (1 + scale) LN(x) + shift``.

The adaptive norm of diffusion transformers (Peebles, Xie, arXiv:2212.09748, section 3.2). LayerNorm: Ba, Kiros, Hinton,
arXiv:1607.06450, with the biased variance and epsilon inside the square root. All tokens of a sample share scale and
shift, so their gradients are sums over the tokens of the sample.

The input is also returned, for the residual connection: backward then adds both gradients in its only pass. Before an
FP8 matrix product, the kernels write y in FP8 with a delayed scale (:mod:`common.ops.fp8_cast`).

Shapes: N samples, R rows (the tokens of all samples, sample by sample), E features.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, Fp8Tensor, Scaling, computed_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def modulated_norm_reference(
    x_RE: Tensor, scale_NE: Tensor, shift_NE: Tensor, epsilon: float, *, fp8: Scaling | None = None
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    """Return x and ``y = (1 + scale) LN(x) + shift``.

    Args:
        x_RE: every sample has R / N consecutive rows.
        scale_NE, shift_NE: rows may be parts of the rows of a larger tensor.
        epsilon: constant that is added to the variance.
        fp8: scale of y in e4m3; None for y in the dtype of x.

    Returns:
        x itself and y, (R, E) each. All other users of x must read the returned x. Do not change the results in place.
    """
    normal_NLE = F.layer_norm(widen(x_RE), x_RE.shape[1:], eps=epsilon).unflatten(0, (len(scale_NE), -1))
    y_NLE = normal_NLE * (1 + widen(scale_NE).unsqueeze(1)) + widen(shift_NE).unsqueeze(1)
    y_RE = y_NLE.flatten(0, 1)
    if fp8 is None:
        return x_RE, y_RE.to(x_RE.dtype)
    return x_RE, replace(computed_reference(y_RE, fp8, E4M3, x_RE.dtype), source=y_RE.to(x_RE.dtype))


MOST_FEATURES = 8192
"""Largest number of features of the Triton kernels, whose programs hold whole rows and sums of that size."""


MODULATED_NORM = Operation(
    "modulated_norm",
    modulated_norm_reference,
    {
        "triton": triton_kernels(
            "benchmarks.flux1.ops.modulated_norm.triton:modulated_norm", most={"features": MOST_FEATURES}
        ),
    },
    kernel_names=(("layer norm and modulation", r"^modulated_norm_"),),
    cases="benchmarks.flux1.ops.modulated_norm.cases",
)
"""Signature: that of :func:`modulated_norm_reference`. Size of a request: ``features``."""
