"""The residual stream between the halves of decoder blocks: pending additions, and the norms that perform them.

Legend: as in :mod:`common.language.architecture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.language.architecture import DecoderNorm
from common.language.movement import Operand, from_saved
from common.language.products import Product
from common.nn import main_gradient
from common.ops.bias_gradient import RowSums
from common.ops.fp8_cast.reference import Handover
from common.ops.row_norm import Normed, RowNorm
from common.ops.triton_support import widen


@dataclass(frozen=True)
class Behind:
    """Work that a row-parallel product leaves to the reader, the operation that reads its result.

    Attributes:
        bias: bias that the reader adds, and whose gradient the reader computes; None without a bias.
        handover: the reader leaves the FP8 gradient of the result here.
    """

    bias: nn.Parameter | None
    handover: Handover


class Pair:
    """Input and output of a half: a residual stream and a pending addition.

    A half takes the tensors out of the pair, because callers may still hold the pair while the next half runs. A sum
    that stays alive for a layer leaves a gap in the memory of a CUDA graph, in which a later layer's sum does not fit.

    Attributes:
        residual: residual stream (s, E) of the tokens of this rank; None after :meth:`take`.
        delta: (s, E), added to ``residual`` by the next half; None if nothing is pending.
        behind: work that the product which computed ``delta`` leaves to the next half; None if it leaves none.
    """

    def __init__(self, residual: Tensor, delta: Tensor | None = None, behind: Behind | None = None) -> None:
        self.residual: Tensor | None = residual
        self.delta, self.behind = delta, behind

    def take(self) -> tuple[Tensor, Tensor | None, Behind | None]:
        """Return residual, delta and ``behind``, and empty the pair."""
        residual, delta, behind = self.residual, self.delta, self.behind
        assert residual is not None, "the pair has been taken"
        self.residual = self.delta = self.behind = None
        return residual, delta, behind


@dataclass(frozen=True)
class NormPasses:
    """Residual addition and norm."""

    functions: RowNorm
    module: DecoderNorm

    def forward(
        self,
        residual_sE: Tensor,
        delta_sE: Tensor | None,
        before: Behind | None,
        product: Product | None,
        inference: bool,
    ) -> Normed:
        """Return the residual stream, the norm's moments, and its result in the formats that ``product`` reads.

        Args:
            product: reads the result; None behind the last layer, because the head reads 16 or more bits.
            inference: whether no backward pass follows, which may leave FP8 scales unchanged.
        """
        scaling, norm = None if product is None else product.input_scaling(), self.module
        return self.functions.forward(
            residual_sE, delta_sE, norm.weight, norm.epsilon, norm.bias, None if before is None else before.bias,
            half=product is None or product.needs_half, fp8=scaling,
            frozen_scales=product is None or product.frozen(inference),
        )  # fmt: skip

    def recompute(self, residual_sE: Tensor, moments: Tensor) -> Tensor:
        """Return the norm's result (s, E) in 16 or more bits, recomputed from its input and moments."""
        return self.functions.recompute(residual_sE, moments, self.module.weight, self.module.bias)

    def operand_again(
        self, product: Product, kept: tuple[Tensor | None, ...], normed: tuple[Tensor, Tensor]
    ) -> Operand:
        """Return the norm's result as ``product`` read it: from ``kept`` if that has FP8 values, else recomputed."""
        data, scale_inverse = kept
        if data is not None:
            assert scale_inverse is not None
            return from_saved(data, scale_inverse)
        y_sE = self.recompute(*normed)
        return y_sE if scale_inverse is None else product.cast_again(y_sE, scale_inverse)

    def backward(
        self,
        before: Behind | None,
        d_y_sE: Tensor,
        residual_sE: Tensor,
        moments: Tensor,
        d_residual_sE: Tensor | None,
    ) -> Tensor:
        """Return the gradient (s, E) of the sum that the norm read, which is that of all its summands.

        Add the gradients of trained parameters and of the bias of ``before``, and leave the FP8 gradient in its
        handover.
        """
        norm = self.module
        dx_sE, dx8 = self.functions.backward(
            d_y_sE, residual_sE, moments, norm.weight, d_residual_sE,
            fp8=None if before is None else before.handover.scaling,
        )  # fmt: skip
        added = None if before is None else before.bias
        if norm.weight.requires_grad:
            found = self.functions.parameter_gradients(d_y_sE, residual_sE, moments, None if added is None else dx_sE)
            trained = [each for each in (norm.weight, norm.bias, added) if each is not None]
            for parameter, gradient in zip(trained, found, strict=True):
                main_gradient.add_(parameter, gradient)
        if before is not None:
            before.handover.gradient = dx8
        return dx_sE


def joined(pair: Pair, bias_gradient: RowSums) -> Tensor:
    """Return the sum (s, E) of the pair, for the next stage or for autograd. Empties the pair."""
    residual_sE, delta_sE, behind = pair.take()
    if delta_sE is None:
        return residual_sE
    result: Tensor = _Joined.apply(bias_gradient, behind, residual_sE, delta_sE)
    return result


def last_normed(pair: Pair, norm: NormPasses) -> Tensor:
    """Return the norm of the pair's sum, the hidden states (s, E) that the head reads. Empties the pair."""
    residual_sE, delta_sE, behind = pair.take()
    result: Tensor = _LastNorm.apply(norm, behind, residual_sE, delta_sE)
    return result


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bias_gradient: RowSums, behind: Behind | None, residual_sE: Tensor, delta_sE: Tensor
    ) -> Tensor:
        ctx.bias_gradient, ctx.bias = bias_gradient, None if behind is None else behind.bias
        total_sE = widen(residual_sE)
        if ctx.bias is not None:
            total_sE = total_sE + widen(ctx.bias.detach())
        return (total_sE + delta_sE).to(residual_sE.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_sE = gradients[0].contiguous()
        if ctx.bias is not None:
            main_gradient.add_(ctx.bias, ctx.bias_gradient(dx_sE, widen(dx_sE[:0]).dtype))
        return None, None, dx_sE, dx_sE


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm: NormPasses, before: Behind | None, residual_sE: Tensor, delta_sE: Tensor | None
    ) -> Tensor:
        ctx.norm, ctx.before, ctx.has_delta = norm, before, delta_sE is not None
        residual_sE, moments, y_sE, _ = norm.forward(residual_sE, delta_sE, before, None, True)
        ctx.save_for_backward(residual_sE, moments)
        assert y_sE is not None
        return y_sE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_sE = ctx.norm.backward(ctx.before, gradients[0].contiguous(), *ctx.saved_tensors, None)
        return None, None, dx_sE, dx_sE if ctx.has_delta else None
