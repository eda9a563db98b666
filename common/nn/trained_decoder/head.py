"""Head and loss of the next token with a head that learns, for some tokens at a time.

The logits of all tokens are never there at once: 8,192 tokens of 128,256 words would be 2.1 GB in 16 bits and 4.2 GB in
fp32. A chunk's logits are in the dtype of the network, the arithmetic on them in fp32 (fp64 of fp64), and their
gradient takes their place. As the loss is a sum with one factor, a chunk's gradients of hidden vectors and weights are
known up to that factor while its logits are there; so they are made in the forward pass, and no logits are computed
twice. The backward pass, which comes right after it, multiplies with the factor. The weight's gradient is in the dtype
in which it is added to those of micro-batches before (:mod:`common.nn.main_gradient`).

Shapes: T tokens, c of a chunk, E hidden, V words.
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
    """How losses are computed.

    Attributes:
        cross_entropy: of some rows of logits.
        chunk: tokens whose logits are there at once.
    """

    cross_entropy: CrossEntropy
    chunk: int

    def summed_loss(self, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, factor: float) -> Tensor:
        """``factor`` times the sum of the losses in nats: 0-d, fp32, or fp64 of fp64; differentiable.

        Args:
            hidden_TE: contiguous.
            weight_VE: of the head.
            labels_T: the next token of each, any integers; -1 where none is scored.
            factor: of the sum, such as one by the number of tokens.
        """
        if not torch.is_grad_enabled():
            return self.losses(hidden_TE, weight_VE, labels_T).sum() * factor
        total: Tensor = _SummedLoss.apply(hidden_TE, weight_VE, labels_T, self, factor)
        return total

    @torch.no_grad()
    def losses(self, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> Tensor:
        """The loss of every token (T,), 0 where none is scored, without gradients."""
        losses = [
            self.cross_entropy(hidden_TE[part] @ weight_VE.t(), labels_T[part], len(weight_VE))[0]
            for part in self.parts(len(hidden_TE))
        ]
        return torch.cat(losses)

    def parts(self, tokens: int) -> Iterator[slice]:
        """The chunks."""
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def chunk_gradient(self, hidden_cE: Tensor, weight_VE: Tensor, labels_c: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (c,), and the gradient of their sum with respect to the logits (c, V)."""
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
            del dlogits_cV  # before the next chunk's logits
        ctx.save_for_backward(dhidden_TE, dweight_VE)
        ctx.factor = factor
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_TE, dweight_VE = ctx.saved_tensors
        factor = gradients[0] * ctx.factor
        return dhidden_TE.mul_(factor), dweight_VE.mul_(factor), None, None, None
