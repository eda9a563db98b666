"""The two halves of a decoder block with hand-written backward passes.

Autograd would keep the inputs of every operation and pass every gradient in 16 bits. Here, a half keeps only what its
backward pass cannot recompute cheaply (see :mod:`common.language`), and the operations write FP8 themselves:

- A norm writes the input of the next product, the activation that of the MLP's second product, and activation and
  positions the gradient of the product before them. Only the attention's result is cast in a separate pass.
- The backward pass of a norm writes the gradient of the product whose result the norm added to the residual stream.
  That product belongs to the half before, so a :class:`Behind` in the pair carries its scale forward and the FP8
  gradient back.

Trained weights are not inputs of the autograd functions. Their gradients are added to the main gradients as soon as
both operands exist (:mod:`common.nn.main_gradient`). Only adapters are inputs. Column-parallel products add their
biases. The biases of output and down are added after the sum over the ranks of tp, by the norm that adds the product to
the residual stream; this norm also computes their gradients.

Under tensor parallelism, norms and residuals process a rank's own tokens. Between two products, a rank has all tokens
and a part of the features; the products move the tokens.

Legend: as in :mod:`common.language.architecture`; L tokens of a row on this rank, h and k local heads, N = (h + 2 k) D,
I = h D, F local features of the MLP's first product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.language.architecture import DecoderOperations, Gradients, Tokens
from common.language.movement import Operand, data_and_scale, from_saved, in_fp8
from common.language.network import DecoderBlock, by_head
from common.language.products import Product, Scratch
from common.language.residual import Behind, NormPasses, Pair, joined
from common.nn import main_gradient
from common.ops.bias_gradient import RowSums
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling


@dataclass(frozen=True)
class QkvHeads:
    """Queries, keys and values of the heads of this rank from the QKV product, and the gradient of that product.

    Attributes:
        heads, kv_heads: h and k, the numbers of heads on this rank.
        rotary: whether positions rotate, see :class:`common.language.architecture.Architecture`.
        positions: chosen implementation of the rotation, or of joining the gradients.
    """

    heads: int
    kv_heads: int
    head_size: int
    rotary: bool
    positions: Any

    def split(self, qkv_TN: Tensor, tokens: Tokens) -> Gradients:
        """Return query (B, L, h, D), key and value (B, L, k, D) of this rank's tokens, rotated or as views."""
        if self.rotary:
            parts = self.positions.forward(qkv_TN, tokens.cos, tokens.sin, self.heads, self.kv_heads)
        else:
            parts = by_head(qkv_TN, self.head_size)
        q, k, v = (part.unflatten(0, (tokens.rows, -1)) for part in parts)
        return q, k, v

    def targets(self, q_BLhD: Tensor, half: bool) -> Gradients | None:
        """Return views of one tensor into which attention writes its gradients; None if they are not joined in place.

        Attention libraries write directly into the joined gradient, if they can. ``half``: whether the QKV product
        needs its gradient in 16 or more bits.
        """
        if self.rotary or not half:
            return None
        rows, length = q_BLhD.shape[:2]
        joined = q_BLhD.new_empty(rows * length, 3 * self.heads * self.head_size)
        q, k, v = (part.unflatten(0, (rows, length)) for part in by_head(joined, self.head_size))
        return q, k, v

    def backward(
        self, gradients: Gradients, tokens: Tokens, half: bool, scaling: Scaling | None
    ) -> tuple[Tensor | None, Fp8Tensor | None, Tensor | None]:
        """Return the gradient (T, N) of the QKV product in 16 or more bits and in FP8, and that of its bias (or None).

        Args:
            half: return the gradient in 16 or more bits; otherwise it may be None.
            scaling: scale of the gradient in FP8; None for no FP8.
        """
        parts = [gradient.flatten(0, 1) for gradient in gradients]
        if not self.rotary:
            made = self.positions(*parts, half=half, fp8=scaling, transpose=scaling is not None)
            return made.d_qkv, made.d_qkv8, made.bias
        parts = [part.contiguous() for part in parts]
        return *self.positions.backward(*parts, tokens.cos, tokens.sin, half=half, fp8=scaling), None


@dataclass(frozen=True)
class AttentionHalf:
    """Norm, QKV, attention and output product of one layer.

    Attributes:
        output_bias: bias that the next norm adds, see :class:`Behind`.
        recompute: whether the backward pass recomputes query, key and value, which are then not kept.
    """

    operations: DecoderOperations
    norm: NormPasses
    heads: QkvHeads
    qkv: Product
    output: Product
    output_bias: nn.Parameter | None
    recompute: bool

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the attention."""
        behind = Behind(self.output_bias, Handover(self.output.gradient_scaling()))
        function: Callable[..., tuple[Tensor, Tensor]] = _AttentionHalf.apply
        adapters = (*self.qkv.adapters, *self.output.adapters)
        residual_sE, delta_sE, before = pair.take()
        residual_sE, delta_sE = function(self, tokens, before, behind, residual_sE, delta_sE, *adapters)
        return Pair(residual_sE, delta_sE, behind)

    def gathered_heads(self, qkv_TN: Tensor, tokens: Tokens) -> Gradients:
        """Return query (B, L, h, D) of this rank's tokens, key and value (B, S, k, D) of whole rows. Collective."""
        q, k, v = self.heads.split(qkv_TN, tokens)
        return q, *self.operations.attention.split.all_gather_kv(k, v)


@dataclass(frozen=True)
class MlpHalf:
    """Norm, first product, activation and second product of one layer.

    Attributes:
        scratch: buffers that all layers share.
        second_bias: bias that the next norm adds, see :class:`Behind`.
        saved: scale for keeping the first product in FP8; None keeps it in its own dtype.
        recompute: whether the backward pass recomputes the first product, which is then not kept.
    """

    activation: Any
    scratch: Scratch
    norm: NormPasses
    first: Product
    second: Product
    second_bias: nn.Parameter | None
    saved: Scaling | None
    recompute: bool

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the MLP."""
        behind = Behind(self.second_bias, Handover(self.second.gradient_scaling()))
        function: Callable[..., tuple[Tensor, Tensor]] = _MlpHalf.apply
        residual_sE, delta_sE, before = pair.take()
        residual_sE, delta_sE = function(self, tokens, before, behind, residual_sE, delta_sE)
        return Pair(residual_sE, delta_sE, behind)

    def keeps_product(self, tokens: Tokens) -> bool:
        """Return whether the backward pass reads the first product itself."""
        return not tokens.inference and not self.recompute and self.saved is None

    def buffer(self, x: Operand | Tensor, tokens: Tokens) -> Tensor | None:
        """Return the shared buffer for a first product that the next layer may overwrite; None to allocate it."""
        if self.keeps_product(tokens) or (self.saved is None and not self.first.trained):
            return None  # a frozen decoder in 16 bits has no buffer of this size
        return self.mlp_buffer(self.first.result_rows(len(data_and_scale(x)[0])), len(self.first.weight))

    def mlp_buffer(self, rows: int, features: int) -> Tensor:
        """Return the buffer that all layers share, as (rows, features) in the dtype of the norm's weight."""
        return self.scratch.mlp((rows, features), self.norm.module.weight.dtype)


@dataclass(frozen=True)
class AutogradHalf:
    """The MLP half of a block with another MLP, whose backward pass is built by autograd.

    Attributes:
        block: has ``mlp``, see :attr:`common.language.architecture.Architecture.mlp`.
    """

    block: DecoderBlock
    bias_gradient: RowSums

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the MLP."""
        x_sE = joined(pair, self.bias_gradient)
        return Pair(x_sE, self.block.feed_forward(self.block.mlp_norm(x_sE)))


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        half: AttentionHalf,
        tokens: Tokens,
        before: Behind | None,
        after: Behind,
        residual_sE: Tensor,
        delta_sE: Tensor | None,
        *adapters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        has_delta = delta_sE is not None
        residual_sE, moments, y_sE, y8 = half.norm.forward(residual_sE, delta_sE, before, half.qkv, tokens.inference)
        underway, y = half.qkv.start_adapter(y_sE, tokens), half.qkv.operand(y_sE, y8, tokens.inference)
        del y_sE, y8  # a temporary that lives longer than the next kept tensor leaves a gap in a CUDA graph's memory
        qkv_TN, qkv_u = half.qkv.forward(y, underway)
        kept_y = _kept_of_input(y, half.qkv, scale=half.recompute)
        del y
        q, k, v = half.gathered_heads(qkv_TN, tokens)
        del qkv_TN
        o_BLhD, ctx.attended = half.operations.attention.forward(q, k, v)
        o_TI = o_BLhD.flatten(0, 1).flatten(1)
        underway, o = half.output.start_adapter(o_TI, tokens), half.output.operand(o_TI, None, tokens.inference)
        out_sE, output_u = half.output.forward(o, underway)
        ctx.save_for_backward(
            residual_sE,
            moments,
            *((None, None, None) if half.recompute else (q, k, v)),
            *kept_y,
            o_BLhD,
            data_and_scale(o)[1] if half.output.trained else None,
            qkv_u,
            output_u,
        )
        ctx.half, ctx.tokens, ctx.before, ctx.after, ctx.has_delta = half, tokens, before, after, has_delta
        return residual_sE, out_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: AttentionHalf = ctx.half
        tokens: Tokens = ctx.tokens
        residual_sE, moments, q, k, v, *kept_y, o_BLhD, o_scale, qkv_u, output_u = ctx.saved_tensors
        normed = (residual_sE, moments)
        if half.recompute:
            q, k, v = _heads_again(half, tokens, tuple(kept_y), normed, qkv_u)
        attention, o_TI = half.operations.attention, o_BLhD.flatten(0, 1).flatten(1)
        o = half.output.cast_again(o_TI, o_scale) if half.output.trained else None
        output = half.output.backward(d_out_sE, ctx.after.handover.take(), o, tokens, output_u)
        assert output.dx is not None
        d_o_BLhD = output.dx.view(o_BLhD.shape)
        scaling = half.qkv.gradient_scaling()
        into = half.heads.targets(q, half.qkv.half_gradient)
        dq, gradients_of_kv = attention.backward(d_o_BLhD, q, k, v, o_BLhD, ctx.attended, into)
        ctx.attended = None
        output = output._replace(dx=None)
        del q, k, v, d_o_BLhD, o
        output_adapter = half.output.adapter_gradients(output, half.output.masked(o_TI, tokens))
        d_qkv_TN, d_qkv8, d_bias = half.heads.backward(
            (dq, *gradients_of_kv()), tokens, half.qkv.half_gradient, scaling
        )
        del dq, gradients_of_kv, into
        if half.qkv.bias is not None:
            assert d_bias is not None
            main_gradient.add_(half.qkv.bias, d_bias)
        y = half.norm.operand_again(half.qkv, tuple(kept_y), normed) if half.qkv.trained else None
        needed = ctx.needs_input_grad[4]  # nothing before the first block is trained if all weights are frozen
        qkv = half.qkv.backward(d_qkv_TN, d_qkv8, y, tokens, qkv_u, needed=needed)
        del d_qkv_TN, d_qkv8, y
        masked = half.qkv.masked_again(half.norm.functions, (*normed, half.norm.module.weight), tokens)
        adapters = (*half.qkv.adapter_gradients(qkv, masked), *output_adapter)
        if qkv.dx is None:
            return None, None, None, None, None, None, *adapters
        dx_sE = half.norm.backward(ctx.before, qkv.dx, *normed, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE if ctx.has_delta else None, *adapters


class _MlpHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        half: MlpHalf,
        tokens: Tokens,
        before: Behind,
        after: Behind,
        residual_sE: Tensor,
        delta_sE: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inference = tokens.inference
        residual_sE, moments, y_sE, y8 = half.norm.forward(residual_sE, delta_sE, before, half.first, inference)
        buffer = half.buffer(residual_sE, tokens)
        y = half.first.operand(y_sE, y8, inference)
        del y_sE, y8
        first_TF, _ = half.first.forward(y, y=buffer)
        kept_y = _kept_of_input(y, half.first)
        del y, buffer
        save_fp8 = None if inference or half.recompute else half.saved
        act_TF, act8, saved = half.activation.forward(
            first_TF, fp8=half.second.input_scaling(), save_fp8=save_fp8,
            frozen_scales=half.second.frozen(inference),
        )  # fmt: skip
        act = half.second.operand(act_TF, act8, inference)
        del act_TF, act8
        out_sE, _ = half.second.forward(act)
        kept: tuple[Tensor | None, ...] = ()
        if save_fp8 is not None:
            kept = (*in_fp8(saved), data_and_scale(act)[0] if half.second.trained else None)
        elif half.keeps_product(tokens):
            kept = (first_TF,)
        act_scale = data_and_scale(act)[1] if half.second.trained else None
        ctx.save_for_backward(residual_sE, moments, *kept_y, act_scale, *kept)
        ctx.in_fp8 = save_fp8 is not None
        ctx.half, ctx.tokens, ctx.before, ctx.after = half, tokens, before, after
        return residual_sE, out_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: MlpHalf = ctx.half
        tokens: Tokens = ctx.tokens
        first, second, activation = half.first, half.second, half.activation
        residual_sE, moments, y_data, y_scale, act_scale, *kept = ctx.saved_tensors
        normed, kept_y = (residual_sE, moments), (y_data, y_scale)
        y: Operand | None = None
        act: Operand | None = None
        saved: Operand
        if ctx.in_fp8:
            data, scale_inverse, act_data = kept
            saved = from_saved(data, scale_inverse)
            act = from_saved(act_data, act_scale) if second.trained else None
        elif kept:
            (saved,) = kept
        else:
            y = half.norm.operand_again(first, kept_y, normed)
            saved = first.multiply(y, half.buffer(y, tokens))
        if second.trained and act is None:
            act_TF, act8, _ = activation.forward(saved, fp8=second.scaling_of(act_scale), frozen_scales=True)
            act = act_TF if act8 is None else act8
        del kept
        # A frozen decoder never keeps the first product in the shared buffer.
        target = None if second.trained else half.mlp_buffer(first.result_rows(len(d_out_sE)), second.weight.shape[1])
        d_act = second.backward(d_out_sE, ctx.after.handover.take(), act, tokens, dx=target).dx
        del act, target
        d_first_TF, d_first8, *d_bias = activation.backward(d_act, saved, fp8=first.gradient_scaling())
        del d_act, saved
        if first.bias is not None:
            main_gradient.add_(first.bias, *d_bias)
        y = half.norm.operand_again(first, kept_y, normed) if y is None and first.trained else y
        d_y_sE = first.backward(d_first_TF, d_first8, y, tokens).dx
        del d_first_TF, d_first8, y
        assert d_y_sE is not None
        dx_sE = half.norm.backward(ctx.before, d_y_sE, *normed, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE


def _heads_again(
    half: AttentionHalf,
    tokens: Tokens,
    kept_y: tuple[Tensor | None, ...],
    normed: tuple[Tensor, Tensor],
    u: Tensor | None,
) -> Gradients:
    """Recompute query, key and value, with the norm's result as in the forward pass."""
    qkv_TN = half.qkv.multiply(half.norm.operand_again(half.qkv, kept_y, normed))
    if half.qkv.adapter is not None and u is not None:
        half.qkv.adapter.add(qkv_TN, u)
    return half.gathered_heads(qkv_TN, tokens)


def _kept_of_input(x: Operand, product: Product, scale: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Return what is kept of a product's FP8 input: all for a trained weight, else only the scale if requested."""
    data, scale_inverse = in_fp8(x)
    if product.trained:
        return data, scale_inverse
    return None, scale_inverse if scale else None
