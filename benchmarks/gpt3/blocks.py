"""Blocks with hand-written backward passes, which control the saved tensors and their dtypes.

As in :mod:`common.nn.trained_decoder`, a block is two halves, each one autograd function. Weights are not inputs of
these functions; their gradients are added to the main gradients as soon as both operands exist.

Operations write FP8 directly. In the forward pass, norms and GELU cast the input of the next product. In the backward
pass, GELU and :mod:`common.ops.qkv_gradient` cast the gradient of the product before them, and a norm casts the
gradient of the product whose result it added to the residual stream, and passes it to the previous half in a
:class:`common.ops.fp8_cast.reference.Handover`. Only the attention result has a separate cast.

Products add the biases of QKV and up. The biases of output and down are added after the sum over the ranks of tp, by
the norm that adds the product to the residual stream; this norm also computes their gradients.

Saved bytes per layer and token, shared by the ranks of tp, for F = 4 E:

- FP8: 22 E (1.1 GB for 4,096 tokens and E = 12,288). Two residuals, the QKV result and the context have 16 bits; the
  inputs of QKV and up, and input and result of GELU have 8 bits.
- 16 bits: 20 E. The same tensors without the inputs of QKV and up and the result of GELU, which are recomputed.

Legend: as in :mod:`benchmarks.gpt3.network`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from benchmarks.gpt3.network import ONE_HEAD, LayerNorm1p
from benchmarks.gpt3.operations import Operations
from common.nn import main_gradient
from common.nn.frozen_decoder.products import Operand, data_and_scale
from common.nn.scratch import Scratch
from common.nn.trained_decoder.products import TrainedProduct
from common.ops.causal_attention.reference import DROPPED
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling
from common.ops.triton_support import widen


@dataclass(frozen=True)
class Tokens:
    """Properties of a micro-batch that all blocks need.

    Attributes:
        rows: B.
        inference: whether no gradients are needed, so that nothing is saved.
    """

    rows: int
    inference: bool


@dataclass(frozen=True)
class Behind:
    """Work that a row-parallel product leaves to the reader, the operation that reads its result.

    Attributes:
        bias: bias that the reader adds, and whose gradient the reader computes.
        handover: the reader leaves the gradient of the result here.
    """

    bias: nn.Parameter
    handover: Handover


class Pair(NamedTuple):
    """Input and output of a half: a residual stream and a pending addition.

    Attributes:
        residual: residual stream (s, E) of the tokens of this rank.
        delta: (s, E), added to ``residual`` by the next half, with ``behind.bias``; None before the first half.
        behind: bias and handover of the product that computed ``delta``; None before the first half.
    """

    residual: Tensor
    delta: Tensor | None
    behind: Behind | None


@dataclass(frozen=True)
class AttentionHalf:
    """Norm, QKV, attention and output product of one layer.

    Attributes:
        head_size: D.
        qkv_bias: bias that ``qkv`` adds; this half computes its gradient.
        output_bias: bias that the next norm adds, see :class:`Behind`.
    """

    head_size: int
    operations: Operations
    norm: LayerNorm1p
    qkv: TrainedProduct
    qkv_bias: nn.Parameter
    output: TrainedProduct
    output_bias: nn.Parameter

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the attention."""
        behind = Behind(self.output_bias, Handover(self.output.gradient_scaling()))
        function: Callable[..., tuple[Tensor, Tensor]] = _AttentionHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.behind, behind, *pair[:2])
        return Pair(residual_sE, delta_sE, behind)

    def by_kind(self, qkv_TN: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views (B, S, h, D) of query, key and value, or of their gradients."""
        q, k, v = qkv_TN.view(rows, len(qkv_TN) // rows, -1, ONE_HEAD, self.head_size).unbind(3)
        return q, k, v


@dataclass(frozen=True)
class MlpHalf:
    """Norm, up, GELU and down of one layer.

    Attributes:
        scratch: buffer that all layers share.
        up_bias: bias that ``up`` adds; this half computes its gradient.
        down_bias: bias that the next norm adds, see :class:`Behind`.
        saved: scale for saving the input of GELU in FP8; None saves it without a cast.
    """

    operations: Operations
    scratch: Scratch
    norm: LayerNorm1p
    up: TrainedProduct
    up_bias: nn.Parameter
    down: TrainedProduct
    down_bias: nn.Parameter
    saved: Scaling | None

    def __call__(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair after the MLP."""
        behind = Behind(self.down_bias, Handover(self.down.gradient_scaling()))
        function: Callable[..., tuple[Tensor, Tensor]] = _MlpHalf.apply
        residual_sE, delta_sE = function(self, tokens, pair.behind, behind, *pair[:2])
        return Pair(residual_sE, delta_sE, behind)

    def first_product(self, y_sE: Operand, passing: bool) -> Tensor:
        """Return the input of GELU; if ``passing``, in the scratch buffer that the next layer overwrites."""
        shape = (self.up.result_rows(len(data_and_scale(y_sE)[0])), len(self.up.weight))
        return self.up.multiply(y_sE, self.scratch.wide(shape, self.up.weight.dtype) if passing else None)


def joined(pair: Pair, operations: Operations) -> Tensor:
    """Return the sum (s, E) of the pair, for the next stage or the last norm."""
    if pair.delta is None or pair.behind is None:  # after a part without layers
        return pair.residual
    result: Tensor = _Joined.apply(operations, pair.behind, *pair[:2])
    return result


def last_normed(x_sE: Tensor, norm: LayerNorm1p, operations: Operations) -> Tensor:
    """Apply the last norm to hidden states (s, E) after the last layer."""
    result: Tensor = _LastNorm.apply(operations, norm, x_sE)
    return result


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
    ) -> tuple[Tensor, Tensor]:
        residual_sE, moments_2s, y = _normed(half, half.qkv, before, residual_sE, delta_sE, tokens.inference)
        qkv_TN = half.qkv.multiply(y)
        scale = half.head_size**-0.5
        o_BShD, attended = half.operations.attention.forward(*half.by_kind(qkv_TN, tokens.rows), scale)
        o = half.output.cast_input(_rows_of(o_BShD), tokens.inference)
        out_sE = half.output.multiply(o)
        ctx.save_for_backward(residual_sE, moments_2s, qkv_TN, o_BShD, data_and_scale(o)[1], *_in_fp8(y))
        ctx.attended = attended._replace(**DROPPED)
        ctx.half, ctx.tokens, ctx.before, ctx.after = half, tokens, before, after
        return residual_sE, out_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: AttentionHalf = ctx.half
        residual_sE, moments_2s, qkv_TN, o_BShD, o_scale, *kept_y = ctx.saved_tensors
        attended, ctx.attended = ctx.attended, None
        d_out = _taken(ctx.after, half.output, d_out_sE)
        d_o_BShD = half.output.backward(d_out, half.output.cast_again(_rows_of(o_BShD), o_scale)).view(o_BShD.shape)
        del d_out
        q, k, v = half.by_kind(qkv_TN, ctx.tokens.rows)
        attended = attended._replace(q=q, k=k, v=v, o=o_BShD)
        d_qkv = _through_attention(half, d_o_BShD, attended, qkv_TN, ctx.tokens.rows)
        del attended, q, k, v, d_o_BShD
        d_y_sE = half.qkv.backward(d_qkv, _again(half, kept_y, residual_sE, moments_2s))
        del d_qkv
        dx_sE = _through_norm(half, ctx.before, d_y_sE, residual_sE, moments_2s, d_residual_sE)
        return None, None, None, None, dx_sE, None if ctx.before is None else dx_sE


def _through_attention(half: AttentionHalf, d_o_BShD: Tensor, attended: Any, qkv_TN: Tensor, rows: int) -> Operand:
    """Return the gradient of the QKV result, in FP8 if the product needs it; add the gradient of the bias."""
    ops, scaling = half.operations, half.qkv.gradient_scaling()
    if scaling is None:  # attention libraries write directly into the joined gradient, if they can
        d_qkv_TN = torch.empty_like(qkv_TN)
        parts = half.by_kind(d_qkv_TN, rows)
        ops.attention.backward_into(d_o_BShD, attended, parts)
    else:
        parts = ops.attention.backward(d_o_BShD, attended)
    by_token = (part.flatten(0, 1) for part in parts)
    made = ops.qkv_gradient(*by_token, half=scaling is None, fp8=scaling, transpose=scaling is not None)
    main_gradient.add_(half.qkv_bias, made.bias)
    return _either(made.d_qkv, made.d_qkv8)


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
        residual_sE, moments_2s, y = _normed(half, half.up, before, residual_sE, delta_sE, inference)
        save_fp8 = None if inference else half.saved
        up_TF = half.first_product(y, passing=inference or save_fp8 is not None)
        act_TF, act8, saved = half.operations.bias_gelu.forward(
            up_TF, None, fp8=half.down.input_scaling(), save_fp8=save_fp8,
            frozen_scales=half.down.frozen(inference),
        )  # fmt: skip
        act = _either(act_TF, act8)
        out_sE = half.down.multiply(act)
        kept: list[Tensor | None] = []  # empty in inference
        if isinstance(saved, Fp8Tensor):
            kept = [*_in_fp8(act), *_in_fp8(saved)]
        elif not inference:
            kept = [saved]
        ctx.save_for_backward(residual_sE, moments_2s, *_in_fp8(y), *kept)
        ctx.in_fp8 = save_fp8 is not None
        ctx.half, ctx.before, ctx.after = half, before, after
        return residual_sE, out_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_residual_sE, d_out_sE = gradients
        half: MlpHalf = ctx.half
        gelu = half.operations.bias_gelu
        residual_sE, moments_2s, y_data, y_scale, *kept = ctx.saved_tensors
        act: Operand
        saved: Operand
        if ctx.in_fp8:
            act_data, act_scale, data, scale_inverse = kept
            act, saved = _fp8(act_data, act_scale), _fp8(data, scale_inverse)
        else:
            (saved,) = kept
            act = _either(*gelu.forward(saved, None)[:2])
        del kept
        d_out = _taken(ctx.after, half.down, d_out_sE)
        d_act_TF = half.down.backward(d_out, act)
        del d_out, act
        made = gelu.backward(d_act_TF, saved, None, fp8=half.up.gradient_scaling())
        del d_act_TF, saved
        main_gradient.add_(half.up_bias, made.bias)
        d_up = _either(made.dx, made.dx8)
        del made
        d_y_sE = half.up.backward(d_up, _again(half, (y_data, y_scale), residual_sE, moments_2s))
        del d_up
        dx_sE = _through_norm(half, ctx.before, d_y_sE, residual_sE, moments_2s, d_residual_sE)
        return None, None, None, None, dx_sE, dx_sE


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operations: Operations, behind: Behind, residual_sE: Tensor, delta_sE: Tensor) -> Tensor:
        ctx.operations, ctx.behind = operations, behind
        total_sE = widen(residual_sE) + widen(behind.bias.detach())
        return (total_sE + delta_sE).to(residual_sE.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_sE = gradients[0].contiguous()
        row_sums = ctx.operations.bias_gradient(dx_sE, widen(dx_sE[:0]).dtype)
        main_gradient.add_(ctx.behind.bias, row_sums)
        return None, None, dx_sE, dx_sE


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operations: Operations, norm: LayerNorm1p, x_sE: Tensor) -> Tensor:
        normed = operations.layer_norm.forward(x_sE, None, norm.weight, norm.epsilon, norm.bias)
        ctx.save_for_backward(x_sE, normed.moments)
        ctx.operations, ctx.norm = operations, norm
        assert normed.y is not None
        return normed.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_sE, moments_2s = ctx.saved_tensors
        norm: LayerNorm1p = ctx.norm
        functions, d_y_sE = ctx.operations.layer_norm, gradients[0].contiguous()
        dx_sE, _ = functions.backward(d_y_sE, x_sE, moments_2s, norm.weight)
        d_weight_E, d_bias_E = functions.parameter_gradients(d_y_sE, x_sE, moments_2s)
        main_gradient.add_(norm.weight, d_weight_E)
        main_gradient.add_(norm.bias, d_bias_E)
        return None, None, dx_sE


def _normed(
    half: AttentionHalf | MlpHalf,
    product: TrainedProduct,
    before: Behind | None,
    residual_sE: Tensor,
    delta_sE: Tensor | None,
    inference: bool,
) -> tuple[Tensor, Tensor, Operand]:
    """Return the residual stream, the moments of the norm, and its result in the format that ``product`` needs."""
    scaling, norm = product.input_scaling(), half.norm
    residual_sE, moments_2s, y_sE, y8 = half.operations.layer_norm.forward(
        residual_sE, delta_sE, norm.weight, norm.epsilon, norm.bias, None if before is None else before.bias,
        half=scaling is None, fp8=scaling, frozen_scales=product.frozen(inference),
    )  # fmt: skip
    return residual_sE, moments_2s, _either(y_sE, y8)


def _again(
    half: AttentionHalf | MlpHalf,
    kept: list[Tensor | None] | tuple[Tensor | None, Tensor | None],
    residual_sE: Tensor,
    moments_2s: Tensor,
) -> Operand:
    """Return the result of the norm that the product has read: the saved FP8 tensor, otherwise recompute it."""
    data, scale_inverse = kept
    if data is not None:
        assert scale_inverse is not None
        return _fp8(data, scale_inverse)
    return half.operations.layer_norm.recompute(residual_sE, moments_2s, half.norm.weight, half.norm.bias)


def _taken(after: Behind, product: TrainedProduct, d_out_sE: Tensor) -> Operand:
    """Return the gradient of the product's result in the format that it needs: from the handover, or cast here."""
    d_out8 = after.handover.take()
    return product.cast_gradient(d_out_sE) if d_out8 is None else d_out8


def _through_norm(
    half: AttentionHalf | MlpHalf,
    before: Behind | None,
    d_y_sE: Tensor,
    residual_sE: Tensor,
    moments_2s: Tensor,
    d_residual_sE: Tensor,
) -> Tensor:
    """Return the gradient of the sum that the norm read, which is that of both summands.

    Add the gradients of the norm and of the bias of ``before``, and leave the FP8 gradient in its handover.
    """
    functions, norm = half.operations.layer_norm, half.norm
    dx_sE, dx8 = functions.backward(
        d_y_sE, residual_sE, moments_2s, norm.weight, d_residual_sE,
        fp8=None if before is None else before.handover.scaling,
    )  # fmt: skip
    given = (d_y_sE, residual_sE, moments_2s, None if before is None else dx_sE)
    d_weight_E, d_bias_E, *d_added_E = functions.parameter_gradients(*given)
    main_gradient.add_(norm.weight, d_weight_E)
    main_gradient.add_(norm.bias, d_bias_E)
    if before is not None:
        main_gradient.add_(before.bias, *d_added_E)
        before.handover.gradient = dx8
    return dx_sE


def _rows_of(o_BShD: Tensor) -> Tensor:
    """Return the view (T, h D)."""
    return o_BShD.flatten(0, 1).flatten(1)


def _either(in_half: Tensor | None, in_fp8: Fp8Tensor | None) -> Operand:
    """Return the result of an operation that returns two values, of which exactly one is not None."""
    made = in_half if in_fp8 is None else in_fp8
    assert made is not None
    return made


def _in_fp8(x: Operand) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors to save for an operand: data and scale if it is in FP8, otherwise None."""
    return (x.data, x.scale_inverse) if isinstance(x, Fp8Tensor) else (None, None)


def _fp8(data: Tensor, scale_inverse: Tensor) -> Fp8Tensor:
    return Fp8Tensor(data, None, scale_inverse, data)
