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

from common.distributed.tensor_parallel.cross_entropy import NOT_SCORED, chunks_of
from common.distributed.tensor_parallel.ranks import TensorParallel, Underway
from common.nn.main_gradient import finish, main_gradient
from common.ops.cross_entropy.reference import OfAPart
from common.ops.triton_support import widen
from common.ops.weight_gradient.half import add_product_


class Scored(NamedTuple):
    """What the gradients of a micro-batch are made of.

    Attributes:
        hidden_sE: vectors of own tokens.
        dlogits: gradient of the logits of each chunk (c, v), up to ``factor``; equally many tokens are each rank's own.
        factor: 0-d, dtype of the vectors.
    """

    hidden_sE: Tensor
    dlogits: list[Tensor]
    factor: Tensor


class Logits(NamedTuple):
    """Of a chunk.

    Attributes:
        logits_cv: of this rank's words.
        losses_c: 0 where nothing is scored.
        lse_c: log-sum-exp over the words of all ranks; anything where nothing is scored.
        scored_c, here_c: whether a token is scored, and by a label of this rank.
        places_c: column of a label that is here, int64; else -1.
    """

    logits_cv: Tensor
    losses_c: Tensor
    lse_c: Tensor
    scored_c: Tensor
    places_c: Tensor
    here_c: Tensor


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
        cross_entropy: of logits of a part of the words.
        finishes: this head is the last to add to the weight's gradient; otherwise the embedding is.
        put_off: gradients of the weight that may wait.
    """

    weight: nn.Parameter
    vocabulary: int
    parallel: TensorParallel
    cross_entropy: OfAPart
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
        losses_RS: list[Tensor] = []
        for _, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, self.parallel, chunk):
            losses_RS.append(self._logits(hidden_cE, labels_c).losses_c.view(self.parallel.size, -1))
        return torch.cat(losses_RS, 1).flatten()

    def scored(self, hidden_cE: Tensor, labels_c: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Losses (c,) of a chunk, and ``factor`` times their sum's gradient by the logits (c, v). Collective."""
        made = self._logits(hidden_cE, labels_c)
        d_losses_c = torch.full_like(made.lse_c, factor)
        # Of a label elsewhere no column is the place.
        places_c = made.places_c.masked_fill(~made.here_c & made.scored_c, len(self.weight))
        words = self._words_here()
        return made.losses_c, self.cross_entropy.gradient(d_losses_c, made.logits_cv, places_c, made.lse_c, words)

    def _logits(self, hidden_cE: Tensor, labels_c: Tensor) -> Logits:
        """Collective: all ranks add up the same numbers in the same order, and have the same losses."""
        weight_vE = self.weight.detach()
        logits_cv = hidden_cE @ weight_vE.t()
        scored_c = labels_c != NOT_SCORED
        local_c = labels_c.long() - self.parallel.index * len(weight_vE)
        here_c = scored_c & (local_c >= 0) & (local_c < len(weight_vE))
        places_c = torch.where(here_c, local_c, NOT_SCORED)
        own_lse_c = self.cross_entropy.log_sum_exp(logits_cv, labels_c, self._words_here())
        of_label_c = widen(logits_cv.gather(1, places_c.clamp(min=0).unsqueeze(1)).squeeze(1)).masked_fill(~here_c, 0.0)
        numbers_12c = torch.stack((own_lse_c, of_label_c)).unsqueeze(0)
        lses_Rc, of_label_Rc = self.parallel.all_gather(numbers_12c).unbind(1)
        lse_c = lses_Rc.logsumexp(0)
        losses_c = (lse_c - of_label_Rc.sum(0)).masked_fill(~scored_c, 0.0)
        return Logits(logits_cv, losses_c, lse_c, scored_c, places_c, here_c)

    def _words_here(self) -> int:
        """Rows of the weight that are words, the first ones."""
        return max(0, min(len(self.weight), self.vocabulary - self.parallel.index * len(self.weight)))

    def hidden_gradient(self, scored: Scored, add_weight: bool) -> Tensor:
        """The gradient of the vectors (s, E); that of the weight is added on the way. Collective.

        Vectors come again beneath the one product, and their gradient leaves beneath the other.
        """
        weight_vE, dhidden_sE = self.weight.detach(), torch.empty_like(scored.hidden_sE)
        for own, dlogits_cv in self._chunks(scored):
            arriving = self._start_gather(scored, own) if add_weight else None
            leaving = self.parallel.start_reduce_scatter(dlogits_cv @ weight_vE)
            if arriving is not None:
                add_product_(main_gradient(self.weight), dlogits_cv, arriving.wait())
            torch.mul(leaving.wait(), scored.factor, out=dhidden_sE[own])
        return dhidden_sE

    @torch.no_grad()
    def add_weight_gradient(self, scored: Scored) -> None:
        """Add the gradient of the weight alone to the main one. Collective."""
        for own, dlogits_cv in self._chunks(scored):
            add_product_(main_gradient(self.weight), dlogits_cv, self._start_gather(scored, own).wait())

    def _start_gather(self, scored: Scored, own: slice) -> Underway:
        """Begin to gather a chunk's vectors times the factor."""
        return self.parallel.start_all_gather(scored.hidden_sE[own] * scored.factor)

    def _chunks(self, scored: Scored) -> Iterator[tuple[slice, Tensor]]:
        """Own tokens of each chunk, and the gradient of the logits of all ranks' in it."""
        start = 0
        for dlogits_cv in scored.dlogits:
            own = slice(start, start + self.parallel.own_count(len(dlogits_cv)))
            yield own, dlogits_cv
            start = own.stop


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
        ctx.save_for_backward(hidden_sE, *kept)
        ctx.head = head
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_sE, *dlogits = ctx.saved_tensors
        head: TiedHead = ctx.head
        factor = (gradients[0] * ctx.late).to(hidden_sE.dtype)
        scored = Scored(hidden_sE, dlogits, factor)
        waits = head.put_off.takes(scored)
        dhidden_sE = head.hidden_gradient(scored, add_weight=not waits)
        if head.finishes and not head.put_off.finishes:
            finish(head.weight)
        return dhidden_sE, None, None, None, None
