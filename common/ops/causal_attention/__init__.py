"""Dense causal attention of grouped queries: ``softmax(scale q k^T + mask) v``, without dropout and without packing.

K heads of keys and values serve H heads of queries, H / K neighbours each (Ainslie et al., arXiv:2305.13245). There may
be more keys than queries: the queries are then the last of the keys' positions, so query i of Sq sees keys
0 ... Sk - Sq + i, as a part of a row does whose earlier keys are gathered from other ranks. The pair of functions works
without autograd: the caller keeps :class:`Saved`, whose q, k and v it may drop and compute again. These may be views of
one product, (B, S, H, 3, D) or another order, whose last dimension alone is dense: Transformer Engine is the one that
copies them.

The libraries are called by the name of their operator, so that none silently takes the place of another. Those in
PyTorch know the mask of a square only: what comes before is attended to without one, and the parts merge by
log-sum-exp.
"""

from __future__ import annotations

from common.ops.causal_attention import cudnn, cudnn_frontend, flash, flash_attention_4, requirements, te
from common.ops.causal_attention.parts import Saved, merge, through
from common.ops.causal_attention.reference import (
    CausalAttention,
    backward_into_reference,
    backward_reference,
    forward_reference,
)
from common.ops.operation import Implementation, Operation

__all__ = ["CAUSAL_ATTENTION", "Saved", "merge"]

CAUSAL_ATTENTION = Operation(
    "causal_attention",
    CausalAttention(forward_reference, backward_reference, backward_into_reference),
    {
        "flash_attention_4": Implementation(through(flash_attention_4.LIBRARY), requirements.flash_4_unsupported),
        "cudnn": Implementation(through(cudnn.LIBRARY), requirements.cudnn_unsupported),
        "flash": Implementation(through(flash.LIBRARY), requirements.flash_unsupported),
        "cudnn_frontend": Implementation(through(cudnn_frontend.LIBRARY), requirements.frontend_unsupported),
        "te": Implementation(through(te.LIBRARY), requirements.te_unsupported),
    },
    kernel_names=(("attention", r"cudnn.*(sdpa|fmha|flash)|(flash|pytorch_flash).*(fwd|bwd)|sdpa_sm"),),
    cases="common.ops.causal_attention.cases",
)
"""Functions: :class:`CausalAttention`. A request says ``head_size``."""
