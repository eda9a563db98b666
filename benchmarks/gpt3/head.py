"""The embedding as a head that learns: the summed loss, whose gradients are added to the main ones.

A chunk's logits are in the dtype of the network; their gradient, known up to one factor, takes their place and is kept
for the backward pass, which comes right after the forward one: 4,096 tokens and 50,304 words are 412 MB in 16 bits, a
quarter of that where four ranks share the words. So no logits are computed twice, and the weight's gradient is added to
the main one by the product that makes it.

The last stage of a pipeline has the head's work beside as many layers as the others have, who wait for it. What nobody
waits for is the weight's gradient: those of the first micro-batches of a step may be put off until this stage has run
all others' and would be idle while the stages before it end theirs. Each keeps its logits' gradient as long.

Shapes: T tokens, s = T / ranks those of one rank of tp, c of a chunk, E hidden, v words of one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.distributed.tensor_parallel.cross_entropy import chunks_of, head_loss, score_chunk
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.nn.main_gradient import finish, main_gradient
from common.ops.triton_support import widen


class Scored(NamedTuple):
    """What the gradients of a micro-batch are made of.

    Attributes:
        hidden_sE: vectors of own tokens.
        labels_T: of all tokens.
        chunk: tokens whose logits were computed at a time.
        dlogits: gradient of the logits of each chunk (c, v), up to ``factor``.
        factor: 0-d, dtype of the vectors.
    """

    hidden_sE: Tensor
    labels_T: Tensor
    chunk: int
    dlogits: list[Tensor]
    factor: Tensor


class PutOff:
    """Gradients of the head's weight that wait for the end of a step.

    Args:
        most: of a step; those of later micro-batches do not wait.
    """

    def __init__(self, most: int) -> None:
        self._most, self._open = most, False
        self._waiting: list[Scored] = []

    def takes(self, scored: Scored) -> bool:
        """Whether this one waits."""
        if not self._open or len(self._waiting) == self._most:
            return False
        self._waiting.append(scored)
        return True

    @property
    def finishes(self) -> bool:
        """Whether a gradient is complete at the end of the step only."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def step(self, head: TiedHead) -> Iterator[None]:
        """The passes of a step, behind which ``head`` adds what has waited. Collective."""
        self._open = True
        try:
            yield
            for scored in self._waiting:
                head.add_weight_gradient(scored)
            if self._waiting:
                finish(head.weight)
        finally:
            self._open = False
            self._waiting.clear()


@dataclass(frozen=True)
class TiedHead:
    """How losses are computed.

    Attributes:
        weight: (v, E), the embedding of this rank.
        vocabulary: words of all ranks; rows behind them are padding.
        parallel: the ranks.
        cross_entropy: of some rows of logits, where one rank has all words; see :mod:`common.ops.cross_entropy`.
        finishes: this head is the last to add to the weight's gradient; otherwise the embedding is.
        put_off: gradients of the weight that may wait.
    """

    weight: nn.Parameter
    vocabulary: int
    parallel: TensorParallel
    cross_entropy: Any
    finishes: bool
    put_off: PutOff = field(default_factory=lambda: PutOff(0))

    def summed_loss(self, hidden_sE: Tensor, labels_T: Tensor, chunk: int, factor: float = 1.0) -> Tensor:
        """``factor`` times the sum of the losses in nats: 0-d, fp32, or fp64 of fp64. Collective in both passes.

        Args:
            hidden_sE: vectors of own tokens that the head reads; contiguous.
            labels_T: the next token of each of all tokens; -1 where none is scored.
            chunk: tokens of all ranks whose logits are computed at a time.
            factor: of the sum, such as one by the number of labels. It is in the arithmetic of the logits' gradient; a
                factor that comes with the backward pass is rounded to the dtype of the network.
        """
        if not torch.is_grad_enabled():
            return self.losses(hidden_sE, labels_T, chunk).sum() * factor
        total: Tensor = _SummedLoss.apply(hidden_sE, self, labels_T, chunk, factor)
        return total

    @torch.no_grad()
    def losses(self, hidden_sE: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
        """The loss of every token (T,), 0 where none is scored, without gradients. Collective."""
        weight_vE = self.weight.detach()
        if self.parallel.size > 1:
            return head_loss(hidden_sE, weight_vE, labels_T, self.parallel, chunk, False, self.vocabulary)[0]
        losses = [
            self.cross_entropy(hidden_cE @ weight_vE.t(), labels_c, self.vocabulary, inplace=True)[0]
            for _, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, self.parallel, chunk)
        ]
        return torch.cat(losses)

    def scored(self, hidden_cE: Tensor, labels_c: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Losses (c,) of a chunk, and ``factor`` times their sum's gradient by the logits (c, v). Collective."""
        weight_vE = self.weight.detach()
        if self.parallel.size > 1:
            scores = score_chunk(hidden_cE, weight_vE, labels_c, self.parallel, self.vocabulary)
            dlogits_cv = scores.gradient().mul_(factor).masked_fill_(~scores.scored_c.unsqueeze(1), 0.0)
            return scores.losses_c, dlogits_cv.to(hidden_cE.dtype)
        logits_cv = hidden_cE @ weight_vE.t()
        with torch.enable_grad():
            leaf_cv = logits_cv.detach().requires_grad_()
            losses_c, _ = self.cross_entropy(leaf_cv, labels_c, self.vocabulary, inplace=True)
            (dlogits_cv,) = torch.autograd.grad(losses_c, leaf_cv, torch.full_like(losses_c, factor))
        return losses_c.detach(), dlogits_cv

    def hidden_gradient(self, scored: Scored, add_weight: bool) -> Tensor:
        """The gradient of the vectors (s, E); that of the weight is added on the way. Collective."""
        weight_vE, dhidden_sE = self.weight.detach(), torch.empty_like(scored.hidden_sE)
        for own, hidden_cE, dlogits_cv in self._chunks(scored):
            leaving = self.parallel.start_reduce_scatter(dlogits_cv @ weight_vE)
            if add_weight:
                main_gradient(self.weight).addmm_(dlogits_cv.t(), hidden_cE * scored.factor)
            torch.mul(leaving.wait(), scored.factor, out=dhidden_sE[own])
        return dhidden_sE

    @torch.no_grad()
    def add_weight_gradient(self, scored: Scored) -> None:
        """Add the gradient of the weight alone to the main one. Collective."""
        for _, hidden_cE, dlogits_cv in self._chunks(scored):
            main_gradient(self.weight).addmm_(dlogits_cv.t(), hidden_cE * scored.factor)

    def _chunks(self, scored: Scored) -> Iterator[tuple[slice, Tensor, Tensor]]:
        parts = chunks_of(scored.hidden_sE, scored.labels_T, self.parallel, scored.chunk)
        for (own, hidden_cE, _), dlogits_cv in zip(parts, scored.dlogits, strict=True):
            yield own, hidden_cE, dlogits_cv


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_sE: Tensor, head: TiedHead, labels_T: Tensor, chunk: int, factor: float) -> Tensor:
        total, kept = widen(hidden_sE.new_zeros(())), []
        # fp16 has not the exponents for small ones, which the scale of the loss brings with the backward pass
        early, ctx.late = (1.0, factor) if hidden_sE.dtype == torch.float16 else (factor, 1.0)
        for _, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, head.parallel, chunk):
            losses_c, dlogits_cv = head.scored(hidden_cE, labels_c, early)
            total += losses_c.sum()
            kept.append(dlogits_cv)
        ctx.save_for_backward(hidden_sE, labels_T, *kept)
        ctx.head, ctx.chunk = head, chunk
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_sE, labels_T, *dlogits = ctx.saved_tensors
        head: TiedHead = ctx.head
        factor = (gradients[0] * ctx.late).to(hidden_sE.dtype)
        scored = Scored(hidden_sE, labels_T, ctx.chunk, dlogits, factor)
        waits = head.put_off.takes(scored)
        dhidden_sE = head.hidden_gradient(scored, add_weight=not waits)
        if head.finishes and not head.put_off.finishes:
            finish(head.weight)
        return dhidden_sE, None, None, None, None
