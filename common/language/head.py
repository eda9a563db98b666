"""Heads and their next-token losses, computed for a chunk of tokens at a time.

The logits of all tokens never exist at the same time: 8,192 tokens of 128,256 words would take 2.1 GB in 16 bits and
4.2 GB in fp32. There are three heads with the same methods:

- :class:`NextTokenHead` works under autograd, with frozen or trained weights, shared by ranks or not.
- :class:`UntiedHead` is for one rank. The loss is a sum with one factor. Therefore the forward pass can already compute
  a chunk's gradients of hidden states and weight, up to that factor, and no logits are computed twice. The weight
  gradient has the dtype in which it is accumulated (:mod:`common.nn.main_gradient`).
- :class:`TiedHead` shares the weight of the embedding, also with other ranks, and adds to the main gradients. The
  gradient of the logits, up to a constant factor, overwrites them in the forward pass and is kept for the backward
  pass: 412 MB in 16 bits for 4,096 tokens and 50,304 words, a quarter of that if four ranks share the words.

The last stage of a pipeline has the same number of layers as the others plus the head, so the other stages wait for it.
Nothing waits for the weight gradient of the head. Therefore, the gradients of the first micro-batches of a step can be
deferred to the end of the step, when this stage would be idle; until then, the gradients of their logits stay in
memory.

The logits of a chunk have the dtype of the network; the arithmetic is in fp32 (fp64 for fp64). The backward pass of
the last two heads must directly follow the forward pass and can run only once.

Shapes: T tokens, s = T / ranks tokens of one rank of tp, c tokens of a chunk, E hidden, V words, v words of one rank.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.distributed.tensor_parallel.ranks import TensorParallel, Underway
from common.distributed.tensor_parallel.vocabulary import NOT_SCORED, chunks_of, next_token_loss
from common.nn.main_gradient import dtype_of, finish, main_gradient
from common.ops.cross_entropy import OfAPart
from common.ops.triton_support import widen
from common.ops.weight_gradient import add_product_

CrossEntropy = Callable[..., tuple[Tensor, Tensor]]
"""Function of (logits, labels, vocabulary, inplace) that returns loss and correctness per row.

See :func:`common.ops.cross_entropy.masked_cross_entropy_reference`.
"""


class LossHead(ABC):
    """Head with its loss."""

    @abstractmethod
    def losses(self, hidden_sE: Tensor, labels_T: Tensor) -> Tensor:
        """Return the loss of every token (T,) in nats, 0 where not scored. Collective over tp.

        Args:
            hidden_sE: hidden vectors of the tokens of this rank, contiguous.
            labels_T: next token of each token of all ranks, in any integer dtype; -1 where not scored.
        """

    @abstractmethod
    def summed_loss(self, hidden_sE: Tensor, labels_T: Tensor, factor: float = 1.0) -> Tensor:
        """Return ``factor`` times the sum of the losses: 0-d, fp32 (fp64 for fp64), differentiable. Collective over tp.

        Args:
            factor: factor on the sum, such as 1 / number of tokens.
        """

    def step(self) -> AbstractContextManager[None]:
        """Context of the passes of a step. Its end adds deferred gradients (default: none). Collective over tp."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class NextTokenHead(LossHead):
    """Head whose losses autograd differentiates.

    Attributes:
        weight: (v, E).
        parallel: ranks that share the words.
        chunk: number of tokens, over all ranks, whose logits exist at the same time.
        vocabulary: number of words on all ranks, if further rows are padding; else None.
    """

    weight: nn.Parameter
    parallel: TensorParallel
    chunk: int
    vocabulary: int | None = None

    def losses(self, hidden_sE: Tensor, labels_T: Tensor) -> Tensor:
        """Return the loss (T,) of every token; see :meth:`LossHead.losses`. Differentiable."""
        return next_token_loss(hidden_sE, self.weight, labels_T, self.parallel, self.chunk, self.vocabulary)

    def summed_loss(self, hidden_sE: Tensor, labels_T: Tensor, factor: float = 1.0) -> Tensor:
        return self.losses(hidden_sE, labels_T).sum() * factor


@dataclass(frozen=True)
class UntiedHead(LossHead):
    """Head of one rank that computes gradients in the forward pass.

    Attributes:
        weight: (V, E).
        cross_entropy: loss of some rows of logits.
        chunk: number of tokens whose logits exist at the same time.
    """

    weight: nn.Parameter
    cross_entropy: CrossEntropy
    chunk: int

    def summed_loss(self, hidden_sE: Tensor, labels_T: Tensor, factor: float = 1.0) -> Tensor:
        if not torch.is_grad_enabled():
            return self.losses(hidden_sE, labels_T).sum() * factor
        total: Tensor = _UntiedLoss.apply(hidden_sE, self.weight, labels_T, self, factor)
        return total

    @torch.no_grad()
    def losses(self, hidden_sE: Tensor, labels_T: Tensor) -> Tensor:
        weight_VE = self.weight
        losses = [
            self.cross_entropy(hidden_sE[part] @ weight_VE.t(), labels_T[part], len(weight_VE))[0]
            for part in self.parts(len(hidden_sE))
        ]
        return torch.cat(losses)

    def parts(self, tokens: int) -> Iterator[slice]:
        """Yield the slice of each chunk of ``tokens`` tokens, in order."""
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


class _UntiedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, head: UntiedHead, factor: float
    ) -> Tensor:
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


class Scored(NamedTuple):
    """Inputs for computing the gradients of a micro-batch.

    Attributes:
        hidden_sE: hidden vectors of the tokens of this rank.
        dlogits: gradient of the logits of each chunk (c, v), to be multiplied by ``factor``. Each rank owns an equal
            share of the tokens of a chunk.
        factor: 0-d, same dtype as ``hidden_sE``.
    """

    hidden_sE: Tensor
    dlogits: list[Tensor]
    factor: Tensor


class Logits(NamedTuple):
    """Logits and losses of a chunk.

    Attributes:
        logits_cv: logits of the words of this rank.
        losses_c: losses; 0 where not scored.
        lse_c: log-sum-exp over the words of all ranks; undefined where not scored.
        scored_c: whether a token has a label.
        places_c: int64, column of the label if it is a word of this rank, otherwise -1.
        here_c: whether the label is a word of this rank.
    """

    logits_cv: Tensor
    losses_c: Tensor
    lse_c: Tensor
    scored_c: Tensor
    places_c: Tensor
    here_c: Tensor


class PendingGradients:
    """Queue of micro-batches whose gradient of the head weight is computed at the end of a step.

    Args:
        most: maximum number per step; the gradients of later micro-batches are computed immediately.
    """

    def __init__(self, most: int) -> None:
        self._most, self._open = most, False
        self._waiting: list[Scored] = []

    def accepts(self, scored: Scored) -> bool:
        """Append a micro-batch if there is capacity, and return whether it was appended."""
        if not self._open or len(self._waiting) == self._most:
            return False
        self._waiting.append(scored)
        return True

    @property
    def waiting(self) -> bool:
        """Whether gradients are pending, so that the weight gradient is complete only at the end of the step."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def step(self, head: TiedHead) -> Iterator[None]:
        """Context of the passes of a step. At its end, ``head`` adds the pending gradients. Collective.

        If the block fails, the pending gradients are discarded.
        """
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
class TiedHead(LossHead):
    """Head that computes losses with the weight of the embedding.

    Attributes:
        weight: (v, E), the rows of the embedding on this rank.
        vocabulary: number of words on all ranks; further rows are padding.
        parallel: ranks that share the words.
        cross_entropy: functions for the logits of some of the words.
        finishes: whether this head is the last to add to the weight gradient; otherwise the embedding is the last.
        chunk: number of tokens, over all ranks, whose logits are computed at a time.
        pending: queue of pending weight gradients.
    """

    weight: nn.Parameter
    vocabulary: int
    parallel: TensorParallel
    cross_entropy: OfAPart
    finishes: bool
    chunk: int
    pending: PendingGradients = field(default_factory=lambda: PendingGradients(0))

    def step(self) -> AbstractContextManager[None]:
        return self.pending.step(self)

    def summed_loss(self, hidden_sE: Tensor, labels_T: Tensor, factor: float = 1.0) -> Tensor:
        """Return ``factor`` times the sum of the losses, 0-d.

        See :meth:`LossHead.summed_loss`. Collective in both passes. Except in fp16, ``factor`` is applied before the
        gradient of the logits is rounded; a factor applied to the result would be rounded to the dtype of the network.
        """
        if not torch.is_grad_enabled():
            return self.losses(hidden_sE, labels_T).sum() * factor
        total: Tensor = _TiedLoss.apply(hidden_sE, self, labels_T, factor)
        return total

    @torch.no_grad()
    def losses(self, hidden_sE: Tensor, labels_T: Tensor) -> Tensor:
        losses_RS: list[Tensor] = []
        for _, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, self.parallel, self.chunk):
            losses_RS.append(self._logits(hidden_cE, labels_c).losses_c.view(self.parallel.size, -1))
        return torch.cat(losses_RS, 1).flatten()

    def scored(self, hidden_cE: Tensor, labels_c: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Return the losses (c,) of a chunk, and ``factor`` times the gradient (c, v) of their sum. Collective."""
        made = self._logits(hidden_cE, labels_c)
        d_losses_c = torch.full_like(made.lse_c, factor)
        # If the label is a word of another rank, use an index beyond the last column; -1 means not scored.
        places_c = made.places_c.masked_fill(~made.here_c & made.scored_c, len(self.weight))
        words = self._words_here()
        return made.losses_c, self.cross_entropy.gradient(d_losses_c, made.logits_cv, places_c, made.lse_c, words)

    def _logits(self, hidden_cE: Tensor, labels_c: Tensor) -> Logits:
        """Return the logits of a chunk. Losses are bitwise equal on all ranks, due to a fixed order. Collective."""
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
        """Return the number of words on this rank; the remaining rows of the weight are padding."""
        return max(0, min(len(self.weight), self.vocabulary - self.parallel.index * len(self.weight)))

    def hidden_gradient(self, scored: Scored, add_weight: bool) -> Tensor:
        """Return the gradient (s, E) of the hidden vectors; if ``add_weight``, add the weight gradient. Collective.

        Gathering the vectors overlaps with one product, and scattering their gradient with the other.
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
        """Add only the weight gradient to the main gradient. Collective."""
        for own, dlogits_cv in self._chunks(scored):
            add_product_(main_gradient(self.weight), dlogits_cv, self._start_gather(scored, own).wait())

    def _start_gather(self, scored: Scored, own: slice) -> Underway:
        """Start to gather the hidden vectors of a chunk, multiplied by the factor."""
        return self.parallel.start_all_gather(scored.hidden_sE[own] * scored.factor)

    def _chunks(self, scored: Scored) -> Iterator[tuple[slice, Tensor]]:
        """Yield, for each chunk, the slice of the tokens of this rank, and the gradient of the logits of all tokens."""
        start = 0
        for dlogits_cv in scored.dlogits:
            own = slice(start, start + self.parallel.own_count(len(dlogits_cv)))
            yield own, dlogits_cv
            start = own.stop


class _TiedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_sE: Tensor, head: TiedHead, labels_T: Tensor, factor: float) -> Tensor:
        total, kept = widen(hidden_sE.new_zeros(())), []
        # In fp16, small gradients would underflow, so the factor is applied later, together with the loss scale.
        early, ctx.late = (1.0, factor) if hidden_sE.dtype == torch.float16 else (factor, 1.0)
        for _, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, head.parallel, head.chunk):
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
        pending = head.pending.accepts(scored)
        dhidden_sE = head.hidden_gradient(scored, add_weight=not pending)
        if head.finishes and not head.pending.waiting:
            finish(head.weight)
        return dhidden_sE, None, None, None
