"""The two halves of a decoder block with a frozen base and hand-written backward passes.

Autograd would keep the inputs of every operation and pass every gradient in 16 bits. Here, a half keeps only what is
expensive to recompute (see :mod:`common.nn.frozen_decoder`), and the operations write FP8 themselves:

- A norm writes the input of the next product.
- SwiGLU and the rotation write the gradient of the product before them.
- The backward pass of a norm writes the gradient of the product whose result the norm added to the residual stream.
  That product belongs to the half before, so a :class:`Handover` in the pair carries its scale forward and the FP8
  gradient back.

The adapters run in 16 bits: ``u = dropout(x) A^T`` (T, r) is kept, and the masked input is recomputed.

Under tensor parallelism, norms and residuals process a rank's own tokens; products process all tokens and a part of
the columns. :class:`common.distributed.tensor_parallel.products.TokenProducts` gathers tokens in FP8, with one scale
per rank. The adapters' transfers are small and start before the product that they overlap with.

Legend: as in :mod:`common.nn.decoder`; r rank of the adapters, N = (H + 2 K) D / ranks, I = H D / ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.distributed.tensor_parallel.products import RowProduct, TokenProducts
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.nn.decoder import DecoderArchitecture
from common.nn.frozen_decoder.adapter import Adapter
from common.nn.frozen_decoder.operations import Operations
from common.nn.frozen_decoder.passing import Pair, Tokens
from common.nn.frozen_decoder.products import FrozenProduct, Operand, data_and_scale
from common.nn.scratch import Scratch
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling


@dataclass(frozen=True)
class AttentionHalf:
    """Norm, QKV, rotation, attention and output product of one layer.

    Attributes:
        products: moves tokens between ranks during products.
        qkv_adapter, output_adapter: constants of the adapters of the two products.
        keep_qkv: whether query, key and value are kept for the backward pass; otherwise it recomputes them.
    """

    architecture: DecoderArchitecture
    operations: Operations
    parallel: TensorParallel
    products: TokenProducts
    scratch: Scratch
    norm_weight: Tensor
    qkv: FrozenProduct
    qkv_adapter: Adapter
    output: FrozenProduct
    output_adapter: Adapter
    keep_qkv: bool

    def __call__(self, pair: Pair, tokens: Tokens, adapters: tuple[Tensor, Tensor, Tensor, Tensor]) -> Pair:
        """Return the pair after the attention. ``adapters``: A and B of QKV, then A and B of the output product."""
        handover = Handover(self.output.gradient_scaling())
        function: Callable[..., tuple[Tensor, Tensor]] = _AttentionHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.handover, handover, *pair[:2], *adapters)
        return Pair(residual_sE, delta_sE, handover)


@dataclass(frozen=True)
class MlpHalf:
    """Norm, gate and up, SwiGLU and down of one layer.

    Attributes:
        products: moves tokens between ranks during products.
        saved: scale for keeping SwiGLU's input in FP8; None keeps it in its own dtype.
    """

    architecture: DecoderArchitecture
    operations: Operations
    parallel: TensorParallel
    products: TokenProducts
    scratch: Scratch
    norm_weight: Tensor
    gate_up: FrozenProduct
    down: FrozenProduct
    saved: Scaling | None

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the MLP."""
        handover = Handover(self.down.gradient_scaling())
        function: Callable[..., tuple[Tensor, Tensor]] = _MlpHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.handover, handover, *pair[:2])
        return Pair(residual_sE, delta_sE, handover)

    def wide(self, tokens: int, features: int) -> Tensor:
        """Return a temporary buffer with ``tokens``, a number per rank, times the number of ranks rows."""
        return self.scratch.wide((tokens * self.parallel.size, features), self.norm_weight.dtype)


@dataclass(frozen=True)
class LastNorm:
    """The norm in front of the head."""

    architecture: DecoderArchitecture
    operations: Operations
    norm_weight: Tensor

    def __call__(self, pair: Pair) -> Tensor:
        """Return the hidden states (s, E)."""
        result: Tensor = _LastNorm.apply(self, pair.handover, *pair[:2])
        return result


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        half: AttentionHalf,
        tokens: Tokens,
        before: Handover | None,
        after: Handover,
        residual_sE: Tensor,
        delta_sE: Tensor | None,
        qkv_a: Tensor,
        qkv_b: Tensor,
        output_a: Tensor,
        output_b: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ops, parallel, resting = half.operations, half.parallel, tokens.resting
        residual_sE, inverse_rms_s, y_sE, y8 = ops.rms_norm.forward(
            residual_sE, delta_sE, half.norm_weight, half.architecture.norm_epsilon,
            half=True, fp8=half.qkv.input_scaling(), frozen_scales=resting,
        )  # fmt: skip
        u = parallel.start_all_gather(half.qkv_adapter.input(y_sE, tokens, tokens.own_numbers) @ qkv_a.t())
        x = half.qkv.cast_input(y_sE, resting) if y8 is None else y8
        del y_sE, y8
        y_scale = data_and_scale(x)[1]
        qkv_TN = _gathered(half, half.qkv.multiply, x, len(half.qkv.weight))
        del x
        qkv_u = u.wait()
        qkv_TN.addmm_(qkv_u, qkv_b.t(), alpha=half.qkv_adapter.lora.scale)
        q, k, v = _rotate(half, tokens, qkv_TN)
        del qkv_TN
        o_BSHD, ctx.attended = ops.attention.forward(q, k, v)
        o_TI = o_BSHD.flatten(0, 1).flatten(1)
        u = parallel.start_reduce_scatter(half.output_adapter.input(o_TI, tokens, tokens.numbers) @ output_a.t())
        o = half.output.cast_input(o_TI, resting)
        out_sE = _scattered(half, half.output.multiply, o, len(half.output.weight))
        output_u = u.wait()
        out_sE.addmm_(output_u, output_b.t(), alpha=half.output_adapter.lora.scale)
        kept = (q, k, v) if half.keep_qkv else (y_scale, None, None)
        ctx.save_for_backward(
            residual_sE, inverse_rms_s, *kept, o_BSHD, qkv_u, output_u, qkv_a, qkv_b, output_a, output_b
        )
        ctx.half, ctx.tokens, ctx.before, ctx.after = half, tokens, before, after
        ctx.has_delta = delta_sE is not None
        return residual_sE, out_sE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: AttentionHalf = ctx.half
        tokens: Tokens = ctx.tokens
        residual_sE, inverse_rms_s, q, k, v, o_BSHD, *kept = ctx.saved_tensors
        qkv_u, output_u, qkv_a, qkv_b, output_a, output_b = kept
        if not half.keep_qkv:
            q, k, v = _again(half, tokens, residual_sE, inverse_rms_s, q, qkv_u, qkv_b)
        ops, parallel = half.operations, half.parallel
        o_TI = o_BSHD.flatten(0, 1).flatten(1)

        adapter = half.output_adapter
        du_sr, d_output_b = _through_b(adapter, d_out_sE, output_u, output_b)
        du = parallel.start_all_gather(du_sr)
        d_out8 = ctx.after.take()
        d_out = half.output.cast_gradient(d_out_sE) if d_out8 is None else d_out8
        d_o_TI = _gathered(half, half.output.towards_input(half.scratch), d_out, half.output.weight.shape[1])
        du_Tr = du.wait()
        adapter.add_input_gradient(d_o_TI, du_Tr, output_a, tokens, tokens.numbers)

        dq, gradients_of_kv = ops.attention.backward(d_o_TI.view(o_BSHD.shape), q, k, v, o_BSHD, ctx.attended)
        ctx.attended = None
        del q, k, v, d_o_TI
        d_output_a = du_Tr.t() @ adapter.input(o_TI, tokens, tokens.numbers)
        dk, dv = gradients_of_kv()
        del gradients_of_kv
        d_qkv_TN, d_qkv8 = ops.rope.backward(
            *(gradient.flatten(0, 1) for gradient in (dq, dk, dv)), tokens.cos, tokens.sin,
            fp8=half.qkv.gradient_scaling(), half=True,
        )  # fmt: skip
        del dq, dk, dv
        adapter = half.qkv_adapter
        du_Tr, d_qkv_b = _through_b(adapter, d_qkv_TN, qkv_u, qkv_b)
        du = parallel.start_reduce_scatter(du_Tr)
        trains_below = ctx.needs_input_grad[4]  # nothing before the first block is trained
        if trains_below:
            d_qkv = half.qkv.cast_gradient(d_qkv_TN) if d_qkv8 is None else d_qkv8
            d_y_sE = _scattered(half, half.qkv.towards_input(half.scratch), d_qkv, half.architecture.hidden)
        du_sr = du.wait()
        d_qkv_a = du_sr.t() @ adapter.input_again(ops.rms_norm, residual_sE, inverse_rms_s, half.norm_weight, tokens)
        adapters = (d_qkv_a, d_qkv_b, d_output_a, d_output_b)
        if not trains_below:
            return None, None, None, None, None, None, *adapters
        adapter.add_input_gradient(d_y_sE, du_sr, qkv_a, tokens, tokens.own_numbers)
        dx_sE = _through_norm(half, ctx.before, d_y_sE, residual_sE, inverse_rms_s, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE if ctx.has_delta else None, *adapters


class _MlpHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        half: MlpHalf,
        tokens: Tokens,
        before: Handover | None,
        after: Handover,
        residual_sE: Tensor,
        delta_sE: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ops, resting, scaling = half.operations, tokens.resting, half.gate_up.input_scaling()
        residual_sE, inverse_rms_s, y_sE, y8 = ops.rms_norm.forward(
            residual_sE, delta_sE, half.norm_weight, half.architecture.norm_epsilon,
            half=scaling is None, fp8=scaling, frozen_scales=resting,
        )  # fmt: skip
        features = len(half.gate_up.weight)
        wide_TF = half.wide(len(residual_sE), features) if half.saved else None
        y = half.gate_up.cast_input(y_sE, resting) if y8 is None else y8
        del y_sE, y8
        gate_up_TF = _gathered(half, half.gate_up.multiply, y, features, wide_TF)
        del y
        act_TF, act8, saved = ops.swiglu.forward(
            gate_up_TF, fp8=half.down.input_scaling(), save_fp8=None if resting else half.saved, frozen_scales=resting
        )
        del gate_up_TF
        act = half.down.cast_input(act_TF, resting) if act8 is None else act8
        out_sE = _scattered(half, half.down.multiply, act, len(half.down.weight))
        kept = (saved.data, saved.scale_inverse) if isinstance(saved, Fp8Tensor) else (saved,)
        ctx.save_for_backward(residual_sE, inverse_rms_s, *kept)
        ctx.half, ctx.before, ctx.after = half, before, after
        return residual_sE, out_sE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: MlpHalf = ctx.half
        residual_sE, inverse_rms_s, *kept = ctx.saved_tensors
        saved = kept[0] if len(kept) == 1 else Fp8Tensor(kept[0], None, kept[1], kept[0])
        features = half.down.weight.shape[1]
        wide_TF = half.wide(len(d_out_sE), features)
        d_out8 = ctx.after.take()
        d_out = half.down.cast_gradient(d_out_sE) if d_out8 is None else d_out8
        d_act_TF = _gathered(half, half.down.towards_input(half.scratch), d_out, features, wide_TF)
        d_gate_up, d_gate_up8 = half.operations.swiglu.backward(d_act_TF, saved, fp8=half.gate_up.gradient_scaling())
        del d_act_TF, saved, kept
        d_gate_up = half.gate_up.cast_gradient(d_gate_up) if d_gate_up8 is None else d_gate_up8
        d_y_sE = _scattered(half, half.gate_up.towards_input(half.scratch), d_gate_up, half.architecture.hidden)
        del d_gate_up, d_gate_up8
        dx_sE = _through_norm(half, ctx.before, d_y_sE, residual_sE, inverse_rms_s, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: LastNorm, before: Handover | None, residual_sE: Tensor, delta_sE: Tensor) -> Tensor:
        residual_sE, inverse_rms_s, y_sE, _ = norm.operations.rms_norm.forward(
            residual_sE, delta_sE, norm.norm_weight, norm.architecture.norm_epsilon
        )
        ctx.save_for_backward(residual_sE, inverse_rms_s)
        ctx.norm, ctx.before = norm, before
        result: Tensor = y_sE
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        residual_sE, inverse_rms_s = ctx.saved_tensors
        dx_sE = _through_norm(ctx.norm, ctx.before, gradients[0], residual_sE, inverse_rms_s, None)
        return None, None, dx_sE, dx_sE


def _gathered(
    half: AttentionHalf | MlpHalf, product: RowProduct, x: Operand, columns: int, y_TN: Tensor | None = None
) -> Tensor:
    """Return the product for the tokens of all ranks, from this rank's rows ``x``. ``y_TN``: buffer for the result."""
    x_sK, scale_inverse = data_and_scale(x)
    if y_TN is None:
        y_TN = half.norm_weight.new_empty(half.parallel.size * len(x_sK), columns)
    half.products.gather_product(x_sK, scale_inverse, product, y_TN)
    return y_TN


def _scattered(half: AttentionHalf | MlpHalf, product: RowProduct, x: Operand, columns: int) -> Tensor:
    """Return the product for this rank's tokens, summed over the ranks."""
    x_TK, scale_inverse = data_and_scale(x)
    y_sN = half.norm_weight.new_empty(half.parallel.own_count(len(x_TK)), columns)
    half.products.product_scatter(x_TK, scale_inverse, product, y_sN)
    return y_sN


def _rotate(half: AttentionHalf, tokens: Tokens, qkv_TN: Tensor) -> tuple[Tensor, ...]:
    """Return the query of this rank's tokens, and key and value of whole rows: (B, S, heads, D), local heads."""
    shape, ranks = half.architecture, half.parallel.size
    parts = half.operations.rope.forward(qkv_TN, tokens.cos, tokens.sin, shape.heads // ranks, shape.kv_heads // ranks)
    q, k, v = (part.unflatten(0, (tokens.rows, -1)) for part in parts)
    return q, *half.operations.attention.gather(k, v)


def _again(
    half: AttentionHalf,
    tokens: Tokens,
    residual_sE: Tensor,
    inverse_rms_s: Tensor,
    y_scale: Tensor | None,
    u_Tr: Tensor,
    b_Nr: Tensor,
) -> tuple[Tensor, ...]:
    """Recompute query, key and value, with the norm's result cast with the scale of the forward pass."""
    y_sE = half.operations.rms_norm.recompute(residual_sE, inverse_rms_s, half.norm_weight)
    qkv_TN = _gathered(half, half.qkv.multiply, half.qkv.cast_with(y_sE, y_scale), len(half.qkv.weight))
    qkv_TN.addmm_(u_Tr, b_Nr.t(), alpha=half.qkv_adapter.lora.scale)
    return _rotate(half, tokens, qkv_TN)


def _through_b(adapter: Adapter, dy_TO: Tensor, u_Tr: Tensor, b_Or: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of u (T, r) and of B (O, r)."""
    scale = adapter.lora.scale
    return (dy_TO @ b_Or).mul_(scale), dy_TO.t() @ (u_Tr * scale)


def _through_norm(
    half: AttentionHalf | MlpHalf | LastNorm,
    before: Handover | None,
    d_y_sE: Tensor,
    residual_sE: Tensor,
    inverse_rms_s: Tensor,
    d_residual_sE: Tensor | None,
) -> Tensor:
    """Return the gradient of the sum that the norm reads, which is that of both the residual stream and the delta."""
    scaling = None if before is None else before.scaling
    dx_sE, dx8 = half.operations.rms_norm.backward(
        d_y_sE, residual_sE, inverse_rms_s, half.norm_weight, d_residual_sE, fp8=scaling
    )
    if before is not None:
        before.gradient = dx8
    result: Tensor = dx_sE
    return result
