"""Trained head and next-token loss, computed for a chunk of tokens at a time.

The logits of all tokens never exist at the same time: 8,192 tokens of 128,256 words would take 2.1 GB in 16 bits and
4.2 GB in fp32. The logits of a chunk have the dtype of the network and are overwritten by their gradient; the
arithmetic is in fp32 (fp64 for fp64).

The loss is a sum with one factor. Therefore the forward pass can already compute a chunk's gradients of hidden states
and weight, up to that factor, and no logits are computed twice. The backward pass, which must follow directly,
multiplies by the factor. The weight gradient has the dtype in which it is accumulated
(:mod:`common.nn.main_gradient`).

Shapes: T tokens, c tokens of a chunk, E hidden, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.nn.main_gradient import dtype_of
from common.ops.triton_support import widen
from common.ops.weight_gradient.half import add_product_

CrossEntropy = Callable[..., tuple[Tensor, Tensor]]
"""See :mod:`common.ops.cross_entropy`."""


@dataclass(frozen=True)
class Head:
    """Settings of the loss computation.

    Attributes:
        cross_entropy: loss of some rows of logits.
        chunk: number of tokens whose logits exist at the same time.
    """

    cross_entropy: CrossEntropy
    chunk: int

    def summed_loss(self, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, factor: float) -> Tensor:
        """Return ``factor`` times the sum of the losses in nats: 0-d, fp32 (fp64 for fp64), differentiable.

        Args:
            hidden_TE: contiguous.
            weight_VE: weight of the head.
            labels_T: next token of each token, in any integer dtype; -1 for no loss.
            factor: factor on the sum, such as 1 / number of tokens.
        """
        if not torch.is_grad_enabled():
            return self.losses(hidden_TE, weight_VE, labels_T).sum() * factor
        total: Tensor = _SummedLoss.apply(hidden_TE, weight_VE, labels_T, self, factor)
        return total

    @torch.no_grad()
    def losses(self, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> Tensor:
        """Return the loss of every token (T,), or 0 for tokens without a label, without gradients."""
        losses = [
            self.cross_entropy(hidden_TE[part] @ weight_VE.t(), labels_T[part], len(weight_VE))[0]
            for part in self.parts(len(hidden_TE))
        ]
        return torch.cat(losses)

    def parts(self, tokens: int) -> Iterator[slice]:
        """Yield the chunks."""
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def chunk_gradient(self, hidden_cE: Tensor, weight_VE: Tensor, labels_c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (c,) and the gradient of their sum with respect to the logits (c, V)."""
        logits_cV = hidden_cE @ weight_VE.t()
        with torch.enable_grad():
            leaf_cV = logits_cV.detach().requires_grad_()
            losses_c, _ = self.cross_entropy(leaf_cV, labels_c, len(weight_VE), inplace=True)
            (dlogits_cV,) = torch.autograd.grad(losses_c, leaf_cV, torch.ones_like(losses_c))
        return losses_c.detach(), dlogits_cV


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, head: Head, factor: float) -> Tensor:
        total = widen(hidden_TE.new_zeros(()))
        dhidden_TE = torch.empty_like(hidden_TE)
        dweight_VE = torch.zeros_like(weight_VE, dtype=dtype_of(weight_VE))
        for part in head.parts(len(hidden_TE)):
            losses_c, dlogits_cV = head.chunk_gradient(hidden_TE[part], weight_VE, labels_T[part])
            torch.mm(dlogits_cV, weight_VE, out=dhidden_TE[part])
            add_product_(dweight_VE, dlogits_cV, hidden_TE[part])
            total += losses_c.sum()
            del dlogits_cV  # free them before the next chunk's logits are allocated
        ctx.save_for_backward(dhidden_TE, dweight_VE)
        ctx.factor = factor
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_TE, dweight_VE = ctx.saved_tensors
        factor = gradients[0] * ctx.factor
        return dhidden_TE.mul_(factor), dweight_VE.mul_(factor), None, None, None
