"""The two halves of a trained decoder block, with hand-written backward passes.

The operations write FP8 themselves, and the gradient of the half before goes back in a
:class:`common.ops.fp8_cast.reference.Handover`, as in :mod:`common.nn.frozen_decoder.blocks`. SwiGLU also writes the
input of the MLP's second product. Only the attention's result is cast in a separate pass.

Weights are not inputs of the autograd functions. Their gradients are added to the main gradients as soon as the
operands are available. Under tensor parallelism, norms and residuals process a rank's own tokens. Between two
products, a rank has all tokens and a part of the features; the products move the tokens (:mod:`.movement`).

Legend: as in :mod:`common.nn.decoder`; N = (H + 2 K) D / ranks, I = H D / ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.nn import main_gradient
from common.nn.decoder import DecoderArchitecture
from common.nn.decoder_operations import DecoderOperations
from common.nn.frozen_decoder.passing import Pair
from common.nn.frozen_decoder.products import Operand, data_and_scale
from common.nn.scratch import Scratch
from common.nn.trained_decoder.products import TrainedProduct
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling


@dataclass(frozen=True)
class Tokens:
    """Data about a micro-batch's tokens that all blocks read.

    Attributes:
        rows: B.
        cos, sin: tables of the rotation, (T, D / 2) each.
        inference: whether no gradients are needed, so that nothing is kept.
    """

    rows: int
    cos: Tensor
    sin: Tensor
    inference: bool


@dataclass(frozen=True)
class AttentionHalf:
    """Norm, QKV, rotation, attention and output product of one layer.

    Attributes:
        ranks: number of tp ranks that share the layer.
    """

    architecture: DecoderArchitecture
    operations: DecoderOperations
    ranks: int
    norm: nn.Parameter
    qkv: TrainedProduct
    output: TrainedProduct

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the attention."""
        handover = Handover(self.output.gradient_scaling())
        function: Callable[..., tuple[Tensor, Tensor]] = _AttentionHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.handover, handover, *pair[:2])
        return Pair(residual_sE, delta_sE, handover)


@dataclass(frozen=True)
class MlpHalf:
    """Norm, gate and up, SwiGLU and down of one layer.

    Attributes:
        scratch: buffers that all layers share.
        saved: scale for keeping the first product in FP8; None keeps it in its own dtype.
        recompute: whether the backward pass recomputes the first product, which is then not kept.
    """

    architecture: DecoderArchitecture
    operations: DecoderOperations
    scratch: Scratch
    norm: nn.Parameter
    gate_up: TrainedProduct
    down: TrainedProduct
    saved: Scaling | None
    recompute: bool

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the MLP."""
        handover = Handover(self.down.gradient_scaling())
        function: Callable[..., tuple[Tensor, Tensor]] = _MlpHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.handover, handover, *pair[:2])
        return Pair(residual_sE, delta_sE, handover)

    def first_product(self, y_sE: Operand, passing: bool) -> Tensor:
        """Return gate and up. ``passing`` puts them into a buffer that the next layer overwrites."""
        shape = (self.gate_up.result_rows(len(data_and_scale(y_sE)[0])), len(self.gate_up.weight))
        return self.gate_up.multiply(y_sE, self.scratch.wide(shape, self.norm.dtype) if passing else None)


@dataclass(frozen=True)
class LastNorm:
    """The norm in front of the head."""

    architecture: DecoderArchitecture
    operations: DecoderOperations
    norm: nn.Parameter

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
    ) -> tuple[Tensor, Tensor]:
        shape, ops = half.architecture, half.operations
        residual_sE, inverse_rms_s, y = _normed(half, half.qkv, residual_sE, delta_sE, tokens.inference)
        qkv_TN = half.qkv.multiply(y)
        heads, kv_heads = shape.heads // half.ranks, shape.kv_heads // half.ranks
        parts = ops.rope.forward(qkv_TN, tokens.cos, tokens.sin, heads, kv_heads)
        del qkv_TN
        q, k, v = (part.unflatten(0, (tokens.rows, -1)) for part in parts)
        k, v = ops.attention.gather(k, v)
        o_BLHD, ctx.attended = ops.attention.forward(q, k, v)
        o = half.output.cast_input(o_BLHD.flatten(0, 1).flatten(1), tokens.inference)
        out_sE = half.output.multiply(o)
        ctx.save_for_backward(residual_sE, inverse_rms_s, q, k, v, o_BLHD, data_and_scale(o)[1], *_in_fp8(y))
        ctx.half, ctx.tokens, ctx.before, ctx.after = half, tokens, before, after
        ctx.has_delta = delta_sE is not None
        return residual_sE, out_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: AttentionHalf = ctx.half
        tokens: Tokens = ctx.tokens
        ops = half.operations
        residual_sE, inverse_rms_s, q, k, v, o_BLHD, o_scale, *kept_y = ctx.saved_tensors
        d_out = _taken(ctx.after, half.output, d_out_sE)
        d_o_TI = half.output.backward(d_out, half.output.cast_again(o_BLHD.flatten(0, 1).flatten(1), o_scale))
        dq, gradients_of_kv = ops.attention.backward(d_o_TI.view(o_BLHD.shape), q, k, v, o_BLHD, ctx.attended)
        ctx.attended = None
        del q, k, v, d_o_TI, d_out
        dk, dv = gradients_of_kv()
        del gradients_of_kv
        scaling = half.qkv.gradient_scaling()
        d_qkv_TN, d_qkv8 = ops.rope.backward(
            *(gradient.flatten(0, 1).contiguous() for gradient in (dq, dk, dv)), tokens.cos, tokens.sin,
            half=scaling is None, fp8=scaling,
        )  # fmt: skip
        del dq, dk, dv
        d_qkv = d_qkv_TN if d_qkv8 is None else d_qkv8
        d_y_sE = half.qkv.backward(d_qkv, _again(half, kept_y, residual_sE, inverse_rms_s))
        dx_sE = _through_norm(half, ctx.before, d_y_sE, residual_sE, inverse_rms_s, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE if ctx.has_delta else None


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
        ops, inference = half.operations, tokens.inference
        residual_sE, inverse_rms_s, y = _normed(half, half.gate_up, residual_sE, delta_sE, inference)
        save_fp8 = None if inference or half.recompute else half.saved
        kept_as_it_is = not inference and not half.recompute and half.saved is None
        gate_up_TF = half.first_product(y, passing=not kept_as_it_is)
        act_TF, act8, saved = ops.swiglu.forward(
            gate_up_TF, fp8=half.down.input_scaling(), save_fp8=save_fp8,
            frozen_scales=half.down.frozen(inference),
        )  # fmt: skip
        act = act_TF if act8 is None else act8
        out_sE = half.down.multiply(act)
        ctx.kept_as_it_is, ctx.kept_in_fp8 = kept_as_it_is, save_fp8 is not None
        kept: tuple[Tensor | None, ...] = (data_and_scale(act)[1],)
        if kept_as_it_is:
            kept += (gate_up_TF,)
        elif save_fp8 is not None:
            kept += (data_and_scale(act)[0], saved.data, saved.scale_inverse)
        ctx.save_for_backward(residual_sE, inverse_rms_s, *_in_fp8(y), *kept)
        ctx.half, ctx.before, ctx.after = half, before, after
        return residual_sE, out_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: MlpHalf = ctx.half
        ops = half.operations
        residual_sE, inverse_rms_s, y_data, y_scale, act_scale, *kept = ctx.saved_tensors
        y: Operand | None = None
        act: Operand
        saved: Tensor | Fp8Tensor
        if ctx.kept_in_fp8:
            act_data, data, scale_inverse = kept
            act, saved = _fp8(act_data, act_scale), _fp8(data, scale_inverse)
        else:
            if ctx.kept_as_it_is:
                (saved,) = kept
            else:
                y = _again(half, (y_data, y_scale), residual_sE, inverse_rms_s)
                saved = half.first_product(y, passing=True)
            act_TF, act8, _ = ops.swiglu.forward(saved, fp8=half.down.scaling_of(act_scale), frozen_scales=True)
            act = act_TF if act8 is None else act8
        del kept
        d_out = _taken(ctx.after, half.down, d_out_sE)
        d_act_TF = half.down.backward(d_out, act)
        del act
        d_gate_up_TF, d_gate_up8 = ops.swiglu.backward(d_act_TF, saved, fp8=half.gate_up.gradient_scaling())
        del d_act_TF, saved
        d_gate_up = d_gate_up_TF if d_gate_up8 is None else d_gate_up8
        del d_gate_up_TF, d_gate_up8
        y = _again(half, (y_data, y_scale), residual_sE, inverse_rms_s) if y is None else y
        d_y_sE = half.gate_up.backward(d_gate_up, y)
        del d_gate_up, y
        dx_sE = _through_norm(half, ctx.before, d_y_sE, residual_sE, inverse_rms_s, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: LastNorm, before: Handover | None, residual_sE: Tensor, delta_sE: Tensor) -> Tensor:
        residual_sE, inverse_rms_s, y_sE, _ = norm.operations.rms_norm.forward(
            residual_sE, delta_sE, norm.norm, norm.architecture.norm_epsilon
        )
        ctx.save_for_backward(residual_sE, inverse_rms_s)
        ctx.norm, ctx.before = norm, before
        result: Tensor = y_sE
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        residual_sE, inverse_rms_s = ctx.saved_tensors
        dx_sE = _through_norm(ctx.norm, ctx.before, gradients[0], residual_sE, inverse_rms_s, None)
        return None, None, dx_sE, dx_sE


def _normed(
    half: AttentionHalf | MlpHalf,
    product: TrainedProduct,
    residual_sE: Tensor,
    delta_sE: Tensor | None,
    inference: bool,
) -> tuple[Tensor, Tensor, Operand]:
    """Return the residual stream, the norm's inverse roots, and its result in the form that ``product`` reads."""
    scaling = product.input_scaling()
    residual_sE, inverse_rms_s, y_sE, y8 = half.operations.rms_norm.forward(
        residual_sE, delta_sE, half.norm, half.architecture.norm_epsilon,
        half=scaling is None, fp8=scaling, frozen_scales=product.frozen(inference),
    )  # fmt: skip
    return residual_sE, inverse_rms_s, y_sE if y8 is None else y8


def _again(
    half: AttentionHalf | MlpHalf,
    kept: list[Tensor | None] | tuple[Tensor | None, Tensor | None],
    residual_sE: Tensor,
    inverse_rms_s: Tensor,
) -> Operand:
    """Return the norm's result as the product read it: from ``kept`` if that has FP8 values, otherwise recomputed."""
    data, scale_inverse = kept
    if data is not None:
        assert scale_inverse is not None
        return _fp8(data, scale_inverse)
    y_sE: Tensor = half.operations.rms_norm.recompute(residual_sE, inverse_rms_s, half.norm)
    return y_sE


def _taken(after: Handover, product: TrainedProduct, d_out_sE: Tensor) -> Operand:
    """Return the gradient of the product's result: in FP8 from the handover, or else cast here."""
    d_out8 = after.take()
    return product.cast_gradient(d_out_sE) if d_out8 is None else d_out8


def _through_norm(
    half: AttentionHalf | MlpHalf | LastNorm,
    before: Handover | None,
    d_y_sE: Tensor,
    residual_sE: Tensor,
    inverse_rms_s: Tensor,
    d_residual_sE: Tensor | None,
) -> Tensor:
    """Return the gradient of the sum that the norm reads, which is that of both the residual stream and the delta.

    The gradient of the norm's weight is added to the main gradient.
    """
    norm, scaling = half.operations.rms_norm, None if before is None else before.scaling
    main_gradient.add_(half.norm, *norm.parameter_gradients(d_y_sE, residual_sE, inverse_rms_s))
    dx_sE, dx8 = norm.backward(d_y_sE, residual_sE, inverse_rms_s, half.norm, d_residual_sE, fp8=scaling)
    if before is not None:
        before.gradient = dx8
    result: Tensor = dx_sE
    return result


def _in_fp8(x: Operand) -> tuple[Tensor | None, Tensor | None]:
    """Return data and inverse scale of an operand in FP8, which are kept; None and None for other operands."""
    return (x.data, x.scale_inverse) if isinstance(x, Fp8Tensor) else (None, None)


def _fp8(data: Tensor, scale_inverse: Tensor) -> Fp8Tensor:
    return Fp8Tensor(data, None, scale_inverse, data)
