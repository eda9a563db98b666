"""Dense causal attention with grouped queries: ``softmax(scale q k^T + mask) v``, without dropout and packing.

Each of K key and value heads serves H / K neighbouring query heads (Ainslie et al., arXiv:2305.13245). There may be
more keys than queries, for example if a rank has a part of a row and gathers the earlier keys from other ranks. The
queries are then at the last positions: query i of Sq sees keys 0 ... Sk - Sq + i. The functions work without autograd:
the caller keeps :class:`Saved`, and may drop its q, k and v and recompute them. These may be views of one tensor such
as (B, S, H, 3, D), as long as their last dimension is contiguous; only Transformer Engine copies them.

Each implementation calls the operator of its library by name, so PyTorch cannot choose another. The operators in
PyTorch support a causal mask only for Sq = Sk: for more keys, :mod:`common.ops.causal_attention.parts` merges two
calls.
"""

from __future__ import annotations

from common.ops.causal_attention import cudnn_frontend, libraries
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
        "flash_attention_4": Implementation(through(libraries.FLASH_4), libraries.flash_4_unsupported),
        "cudnn": Implementation(through(libraries.CUDNN), libraries.cudnn_unsupported),
        "flash": Implementation(through(libraries.FLASH), libraries.flash_unsupported),
        "cudnn_frontend": Implementation(through(cudnn_frontend.LIBRARY), libraries.frontend_unsupported),
        "te": Implementation(through(libraries.TE), libraries.te_unsupported),
    },
    kernel_names=(("attention", r"cudnn.*(sdpa|fmha|flash)|(flash|pytorch_flash).*(fwd|bwd)|sdpa_sm"),),
    cases="common.ops.causal_attention.cases",
)
"""Functions: those of :class:`CausalAttention`. Size of a request: ``head_size``."""
