"""Embedding, and head with next-token cross-entropy in chunks of tokens; each rank holds a part of the vocabulary.

The logits of all tokens never exist at once. Each chunk gathers the same number of tokens from every rank, and each
rank multiplies them by its part of the head. Per token a rank then sends three numbers: the largest logit, the sum of
exponentials and the label's logit. All ranks reduce these numbers in the same order, so their losses are bitwise equal.

The gradient of a hidden vector is the gradient of its loss times a vector that the forward pass can compute. With a
frozen head the forward pass computes this vector while the logits exist, and the backward pass only scales it. The
gradient of a trainable head is a sum over tokens whose factors only the backward pass knows, so that pass recomputes
the logits. The weight gradient accumulates over chunks in fp32 and is rounded once if the main gradient has 16 bits.

A vocabulary that is padded for the ranks has more rows than words. The padding is excluded from the softmax and gets
no gradient, so losses do not depend on the number of ranks.

Arithmetic on logits is in fp32, or in fp64 for fp64 inputs. Shapes: T tokens, s = T / ranks tokens of one rank,
E hidden size, V words, v words of one rank, c tokens of a chunk, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import TensorSplit
from common.ops.weight_gradient import add_product_

NOT_SCORED = -1
"""Label of tokens that are excluded from the loss."""


class VocabularyParallelEmbedding(nn.Module):
    """Embedding table; each rank holds some of the words.

    Args:
        vocabulary: number of rows over all ranks, V.
        hidden: width of the vectors, E.
        kept: number of leading rows that are words; the others are padding that makes V divisible. None for all rows.

    Attributes:
        weight: (v, E).

    Raises:
        ConfigError: ``tp`` does not divide the vocabulary.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        parallel: TensorParallel,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kept: int | None = None,
    ) -> None:
        super().__init__()
        self._parallel = parallel
        split = TensorSplit.sharded((vocabulary, hidden), 0, (vocabulary,), parallel.size, parallel.index, kept)
        self.splits = {"weight": split}
        self.weight = nn.Parameter(torch.empty(split.local_shape, device=device, dtype=dtype))
        self.partial_over: Mapping[str, tuple[str, ...]] = {}

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Return the vectors (s, E) of this rank's tokens. Collective.

        Args:
            tokens_T: integer ids of all tokens, equal on all ranks.
        """
        if self._parallel.size == 1:
            return F.embedding(tokens_T, self.weight)
        own = self.weight.shape[0]
        local_T = tokens_T - self._parallel.index * own
        elsewhere_T = (local_T < 0) | (local_T >= own)
        vectors_TE = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self._parallel.scatter_tokens(vectors_TE.masked_fill(elsewhere_T.unsqueeze(1), 0.0))


def next_token_loss(
    hidden_sE: Tensor,
    weight_vE: Tensor,
    labels_T: Tensor,
    parallel: TensorParallel,
    chunk: int,
    vocabulary: int | None = None,
) -> Tensor:
    """Return the cross-entropy of every token, in nats. Forward and backward are collective.

    Args:
        hidden_sE: hidden vectors of this rank's tokens.
        weight_vE: this rank's rows of the head, in rank order. Its gradient needs no sum over the ``tp`` ranks.
        labels_T: next token of each token, any integer dtype, equal on all ranks; ``NOT_SCORED`` to exclude a token.
        chunk: number of tokens, over all ranks, whose logits exist at once.
        vocabulary: number of words over all ranks, the first rows of the table; None if no row is padding.

    Returns:
        losses (T,), equal on every rank; 0 for excluded tokens. All ranks must process them in the same way: the
        gradient of the losses is used as it is, not summed over the ranks.

    Raises:
        ValueError: the shapes of labels and tokens do not match, or ``chunk`` is smaller than the number of ranks.
    """
    losses_T: Tensor = _NextTokenLoss.apply(
        hidden_sE, weight_vE, labels_T, parallel, chunk, vocabulary, torch.is_grad_enabled()
    )
    return losses_T


@torch.no_grad()
def _losses_and_rows(
    hidden_sE: Tensor,
    weight_vE: Tensor,
    labels_T: Tensor,
    parallel: TensorParallel,
    chunk: int,
    vocabulary: int | None,
    with_rows: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses (T,); ``with_rows``: also the gradient (s, E) of each own token's loss by its hidden vector."""
    s = hidden_sE.shape[0]
    losses_RS = hidden_sE.new_empty(parallel.size, s, dtype=_at_least_fp32(hidden_sE.dtype))
    rows_sE = torch.empty_like(hidden_sE) if with_rows else None
    for own, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, parallel, chunk):
        scores = _score(hidden_cE, weight_vE, labels_c, parallel, vocabulary)
        losses_RS[:, own] = scores.losses_c.view(parallel.size, -1)
        if rows_sE is not None:
            rows_cE = scores.gradient().to(hidden_cE.dtype) @ weight_vE
            # Logits of excluded tokens may be NaN, and 0 * NaN would reach the gradient.
            rows_cE.masked_fill_(~scores.scored_c.unsqueeze(1), 0.0)
            rows_sE[own] = parallel.reduce_scatter(rows_cE)
    return losses_RS.flatten(), rows_sE


class _Scores(NamedTuple):
    """Losses of a chunk, and the values that its gradient needs.

    ``exponentials_cv`` are relative to this rank's largest logit; times ``factors_c`` they are probabilities.
    """

    losses_c: Tensor
    scored_c: Tensor
    exponentials_cv: Tensor
    factors_c: Tensor
    local_c: Tensor
    here_c: Tensor

    def gradient(self) -> Tensor:
        """Return each token's loss gradient (c, v) with respect to this rank's logits; overwrites the exponentials."""
        probabilities_cv = self.exponentials_cv.mul_(self.factors_c.unsqueeze(1))
        ones_c1 = self.here_c.unsqueeze(1).to(probabilities_cv.dtype)
        return probabilities_cv.scatter_add_(1, self.local_c.unsqueeze(1), -ones_c1)


def _score(
    hidden_cE: Tensor, weight_vE: Tensor, labels_c: Tensor, parallel: TensorParallel, vocabulary: int | None
) -> _Scores:
    v = weight_vE.shape[0]
    logits_cv = (hidden_cE @ weight_vE.t()).to(_at_least_fp32(hidden_cE.dtype))
    if vocabulary is not None:
        # Finite instead of -inf: if a rank has only padding, its largest logit is subtracted and -inf would give NaN.
        logits_cv[:, max(vocabulary - parallel.index * v, 0) :] = torch.finfo(logits_cv.dtype).min
    local_c = labels_c.long() - parallel.index * v
    here_c = (local_c >= 0) & (local_c < v) & (labels_c != NOT_SCORED)
    local_c = local_c.clamp(0, v - 1)
    largest_c = logits_cv.amax(1)
    of_label_c = logits_cv.gather(1, local_c.unsqueeze(1)).squeeze(1).masked_fill(~here_c, 0.0)
    exponentials_cv = logits_cv.sub_(largest_c.unsqueeze(1)).exp_()
    numbers_13c = torch.stack((largest_c, exponentials_cv.sum(1), of_label_c)).unsqueeze(0)
    largest_Rc, sums_Rc, of_label_Rc = parallel.all_gather(numbers_13c).unbind(1)
    maximum_c = largest_Rc.amax(0)
    sum_c = (sums_Rc * (largest_Rc - maximum_c).exp()).sum(0)
    scored_c = labels_c != NOT_SCORED
    losses_c = (maximum_c + sum_c.log() - of_label_Rc.sum(0)).masked_fill(~scored_c, 0.0)
    return _Scores(losses_c, scored_c, exponentials_cv, (largest_c - maximum_c).exp() / sum_c, local_c, here_c)


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_sE: Tensor,
        weight_vE: Tensor,
        labels_T: Tensor,
        parallel: TensorParallel,
        chunk: int,
        vocabulary: int | None,
        recording: bool,
    ) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        ctx.parallel, ctx.chunk, ctx.vocabulary, ctx.learns = parallel, chunk, vocabulary, of_weight
        ctx.grad_dtype = weight_vE.grad_dtype or weight_vE.dtype
        early = recording and of_hidden and not of_weight
        losses_T, rows_sE = _losses_and_rows(hidden_sE, weight_vE, labels_T, parallel, chunk, vocabulary, early)
        ctx.save_for_backward(*((hidden_sE, weight_vE, labels_T) if of_weight else (rows_sE,)))
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.learns:
            (rows_sE,) = ctx.saved_tensors
            own_s1 = ctx.parallel.own_tokens(dlosses_T).unsqueeze(1)
            return (rows_sE * own_s1).to(rows_sE.dtype), None, None, None, None, None, None
        hidden_sE, weight_vE, labels_T = ctx.saved_tensors
        dhidden_sE = torch.empty_like(hidden_sE) if ctx.needs_input_grad[0] else None
        dweight_vE = torch.zeros_like(weight_vE, dtype=_at_least_fp32(weight_vE.dtype))
        dlosses_RS = dlosses_T.view(ctx.parallel.size, -1)
        for own, hidden_cE, labels_c in chunks_of(hidden_sE, labels_T, ctx.parallel, ctx.chunk):
            scores = _score(hidden_cE, weight_vE, labels_c, ctx.parallel, ctx.vocabulary)
            dlogits_cv = scores.gradient().mul_(dlosses_RS[:, own].reshape(-1, 1))
            dlogits_cv.masked_fill_(~scores.scored_c.unsqueeze(1), 0.0)
            narrow_cv = dlogits_cv.to(hidden_cE.dtype)
            add_product_(dweight_vE, narrow_cv, hidden_cE)
            if dhidden_sE is not None:
                dhidden_sE[own] = ctx.parallel.reduce_scatter(narrow_cv @ weight_vE)
            del scores, dlogits_cv, narrow_cv  # free memory before the next chunk's logits
        return dhidden_sE, dweight_vE.to(ctx.grad_dtype), None, None, None, None, None


def chunks_of(
    hidden_sE: Tensor, labels_T: Tensor, parallel: TensorParallel, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each chunk this rank's slice of tokens, and hidden vectors and labels of all ranks. Collective.

    Raises:
        ValueError: see :func:`next_token_loss`.
    """
    _check(hidden_sE, labels_T, parallel, chunk)
    s, step = hidden_sE.shape[0], chunk // parallel.size
    labels_RS = labels_T.view(parallel.size, s)
    for start in range(0, s, step):
        own = slice(start, min(start + step, s))
        yield own, parallel.all_gather(hidden_sE[own]), labels_RS[:, own].reshape(-1)


def _check(hidden_sE: Tensor, labels_T: Tensor, parallel: TensorParallel, chunk: int) -> None:
    tokens = hidden_sE.shape[0] * parallel.size
    if labels_T.shape != (tokens,):
        raise ValueError(f"labels {tuple(labels_T.shape)} for {tokens} tokens: one for each token of all ranks")
    if chunk < parallel.size:
        raise ValueError(f"chunk={chunk}: at least one token for each of the {parallel.size} ranks")


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
