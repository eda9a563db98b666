"""The two halves of a decoder block whose base is frozen, with backward passes written out.

Autograd would keep what each operation reads, and pass every gradient in 16 bits from one operation to the next. Here a
half keeps only what cannot be had cheaply (:mod:`common.nn.frozen_decoder`), and the operations write FP8 themselves: a
norm the input of the product behind it, SwiGLU and the rotation the gradient of the product before them, and the
backward pass of a norm that of the product whose result it added to the residual stream. This last product belongs to
the half before, so its scale comes along with the pair, and the gradient in FP8 goes back the same way, in a
:class:`Handover`.

The adapters' part (:mod:`.adapter`) is in 16 bits: ``u = dropout(x) A^T`` of every token is kept (T, r), the masked
input is made again from what the half keeps anyway.

Under tensor parallelism norms and residuals are of a rank's own tokens, products of all tokens and a part of the
columns. FP8 values of one tensor need one scale: what is gathered is gathered in 16 bits, and cast by every rank alike.

Legend: as in :mod:`common.nn.decoder`; r rank of the adapters, N = (H + 2 K) D / ranks, I = H D / ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.nn.decoder import DecoderArchitecture
from common.nn.frozen_decoder.adapter import Adapter
from common.nn.frozen_decoder.operations import Operations
from common.nn.frozen_decoder.passing import Handover, Pair, Tokens
from common.nn.frozen_decoder.products import FrozenProduct, Scratch
from common.ops.fp8_cast.plain import Fp8Tensor, Scaling


@dataclass(frozen=True)
class AttentionHalf:
    """Norm, QKV, rotation, attention and output product of one layer.

    Attributes:
        qkv_adapter, output_adapter: the constants of the adapters of the two products.
        keep_qkv: keep query, key and value for the backward pass; otherwise they are computed again.
    """

    architecture: DecoderArchitecture
    operations: Operations
    parallel: TensorParallel
    scratch: Scratch
    norm_weight: Tensor
    qkv: FrozenProduct
    qkv_adapter: Adapter
    output: FrozenProduct
    output_adapter: Adapter
    keep_qkv: bool

    def __call__(self, pair: Pair, tokens: Tokens, adapters: tuple[Tensor, Tensor, Tensor, Tensor]) -> Pair:
        """The pair behind the attention; ``adapters``: A and B of QKV, A and B of the output product."""
        handover = Handover(_early(self.output.gradient_scaling(), self.parallel))
        function: Callable[..., tuple[Tensor, Tensor]] = _AttentionHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.handover, handover, *pair[:2], *adapters)
        return Pair(residual_sE, delta_sE, handover)


@dataclass(frozen=True)
class MlpHalf:
    """Norm, gate and up, SwiGLU and down of one layer.

    Attributes:
        saved: the scale with which SwiGLU's input is kept in FP8; None keeps it as it is.
    """

    architecture: DecoderArchitecture
    operations: Operations
    parallel: TensorParallel
    scratch: Scratch
    norm_weight: Tensor
    gate_up: FrozenProduct
    down: FrozenProduct
    saved: Scaling | None

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """The pair behind the MLP."""
        handover = Handover(_early(self.down.gradient_scaling(), self.parallel))
        function: Callable[..., tuple[Tensor, Tensor]] = _MlpHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.handover, handover, *pair[:2])
        return Pair(residual_sE, delta_sE, handover)

    def wide(self, tokens: int, product: FrozenProduct, turned: bool = False) -> Tensor:
        """Room for the product's result, or, ``turned``, for the gradient of its input."""
        rows, columns = product.weight.shape
        return self.scratch.wide((tokens, columns if turned else rows), self.norm_weight.dtype)


@dataclass(frozen=True)
class LastNorm:
    """The norm that the head reads."""

    architecture: DecoderArchitecture
    operations: Operations
    norm_weight: Tensor

    def __call__(self, pair: Pair) -> Tensor:
        """Hidden states (s, E)."""
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
            half=True, fp8=_early(half.qkv.input_scaling(), parallel), frozen_scales=resting,
        )  # fmt: skip
        x = _gathered_input(half.qkv, parallel, y_sE, y8, resting)
        qkv_TN = half.qkv(x)
        y_scale = x.scale_inverse if isinstance(x, Fp8Tensor) else None
        del x, y8
        qkv_u = half.qkv_adapter.input(y_sE, tokens, tokens.own_numbers) @ qkv_a.t()
        del y_sE
        qkv_u = parallel.all_gather(qkv_u)
        qkv_TN.addmm_(qkv_u, qkv_b.t(), alpha=half.qkv_adapter.lora.scale)
        q, k, v = _rotate(half, tokens, qkv_TN)
        del qkv_TN
        o_BSHD, ctx.attended = ops.attention.forward(q, k, v)
        o_TI = o_BSHD.flatten(0, 1).flatten(1)
        out_sE = parallel.reduce_scatter(half.output(half.output.cast_input(o_TI, resting)))
        output_u = parallel.reduce_scatter(half.output_adapter.input(o_TI, tokens, tokens.numbers) @ output_a.t())
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
        d_o_TI = half.output.input_gradient(
            _gathered_gradient(half.output, parallel, ctx.after, d_out_sE), half.scratch
        )
        du_sr, d_output_b = _through_b(adapter, d_out_sE, output_u, output_b)
        du_Tr = parallel.all_gather(du_sr)
        d_output_a = du_Tr.t() @ adapter.input(o_TI, tokens, tokens.numbers)
        adapter.add_input_gradient(d_o_TI, du_Tr, output_a, tokens, tokens.numbers)

        dq, dk, dv = ops.attention.backward(d_o_TI.view(o_BSHD.shape), q, k, v, o_BSHD, ctx.attended)
        ctx.attended = None
        del q, k, v, d_o_TI
        d_qkv_TN, d_qkv8 = ops.rope.backward(
            *(gradient.flatten(0, 1) for gradient in (dq, dk, dv)), tokens.cos, tokens.sin,
            fp8=half.qkv.gradient_scaling(), half=True,
        )  # fmt: skip
        del dq, dk, dv
        adapter = half.qkv_adapter
        du_Tr, d_qkv_b = _through_b(adapter, d_qkv_TN, qkv_u, qkv_b)
        du_sr = parallel.reduce_scatter(du_Tr)
        d_qkv_a = du_sr.t() @ adapter.input_again(ops.rms_norm, residual_sE, inverse_rms_s, half.norm_weight, tokens)
        adapters = (d_qkv_a, d_qkv_b, d_output_a, d_output_b)
        if not ctx.needs_input_grad[4]:  # below the first block there is nothing to train
            return None, None, None, None, None, None, *adapters
        d_y_sE = parallel.reduce_scatter(half.qkv.input_gradient(d_qkv_TN if d_qkv8 is None else d_qkv8, half.scratch))
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
        ops, parallel, resting = half.operations, half.parallel, tokens.resting
        scaling = _early(half.gate_up.input_scaling(), parallel)
        residual_sE, inverse_rms_s, y_sE, y8 = ops.rms_norm.forward(
            residual_sE, delta_sE, half.norm_weight, half.architecture.norm_epsilon,
            half=scaling is None, fp8=scaling, frozen_scales=resting,
        )  # fmt: skip
        x = _gathered_input(half.gate_up, parallel, y_sE, y8, resting)
        gate_up_TF = half.gate_up(x, half.wide(len(residual_sE) * parallel.size, half.gate_up) if half.saved else None)
        del x, y_sE, y8
        act_TF, act8, saved = ops.swiglu.forward(
            gate_up_TF, fp8=half.down.input_scaling(), save_fp8=None if resting else half.saved, frozen_scales=resting
        )
        del gate_up_TF
        out_sE = parallel.reduce_scatter(half.down(act_TF if act8 is None else act8))
        kept = (saved.data, saved.scale_inverse) if isinstance(saved, Fp8Tensor) else (saved,)
        ctx.save_for_backward(residual_sE, inverse_rms_s, *kept)
        ctx.half, ctx.before, ctx.after = half, before, after
        return residual_sE, out_sE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: MlpHalf = ctx.half
        parallel = half.parallel
        residual_sE, inverse_rms_s, *kept = ctx.saved_tensors
        saved = kept[0] if len(kept) == 1 else Fp8Tensor(kept[0], None, kept[1], kept[0])
        d_out = _gathered_gradient(half.down, parallel, ctx.after, d_out_sE)
        wide_TF = half.wide(len(d_out_sE) * parallel.size, half.down, turned=True)
        d_act_TF = half.down.input_gradient(d_out, half.scratch, wide_TF)
        d_gate_up, d_gate_up8 = half.operations.swiglu.backward(d_act_TF, saved, fp8=half.gate_up.gradient_scaling())
        del d_act_TF, saved, kept
        d_y_sE = parallel.reduce_scatter(
            half.gate_up.input_gradient(d_gate_up if d_gate_up8 is None else d_gate_up8, half.scratch)
        )
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


def _early(scaling: Scaling | None, parallel: TensorParallel) -> Scaling | None:
    """The scale with which own tokens are cast before they are gathered: only where there is nothing to gather."""
    return scaling if parallel.size == 1 else None


def _gathered_input(
    product: FrozenProduct, parallel: TensorParallel, y_sE: Tensor | None, y8: Fp8Tensor | None, resting: bool
) -> Tensor | Fp8Tensor:
    """All tokens as a product wants them, from own ones."""
    if y8 is not None:
        return y8
    assert y_sE is not None
    result: Tensor | Fp8Tensor = product.cast_input(parallel.all_gather(y_sE), resting)
    return result


def _gathered_gradient(
    product: FrozenProduct, parallel: TensorParallel, handover: Handover, dy_sO: Tensor
) -> Tensor | Fp8Tensor:
    """The gradient of a product's result for all tokens, as its input gradient wants it."""
    early = handover.take()
    if early is not None:
        return early
    result: Tensor | Fp8Tensor = product.cast_gradient(parallel.all_gather(dy_sO))
    return result


def _rotate(half: AttentionHalf, tokens: Tokens, qkv_TN: Tensor) -> tuple[Tensor, ...]:
    """Query of this rank's tokens, key and value of whole rows, of this rank's heads, (B, S, heads, D)."""
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
    """Query, key and value once more, the norm's output cast with the scale of the forward pass."""
    y_TE = half.parallel.all_gather(half.operations.rms_norm.recompute(residual_sE, inverse_rms_s, half.norm_weight))
    qkv_TN = half.qkv(half.qkv.cast_with(y_TE, y_scale))
    qkv_TN.addmm_(u_Tr, b_Nr.t(), alpha=half.qkv_adapter.lora.scale)
    return _rotate(half, tokens, qkv_TN)


def _through_b(adapter: Adapter, dy_TO: Tensor, u_Tr: Tensor, b_Or: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of u (T, r) and of B (O, r)."""
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
    """The gradient of the sum that the norm read: of the residual stream and of what was added to it."""
    scaling = None if before is None else before.scaling
    dx_sE, dx8 = half.operations.rms_norm.backward(
        d_y_sE, residual_sE, inverse_rms_s, half.norm_weight, d_residual_sE, fp8=scaling
    )
    if before is not None:
        before.gradient = dx8
    result: Tensor = dx_sE
    return result
