"""Network that maps rows of tokens to the losses of their next tokens.

Legend: B rows, S tokens per row without the label of the last one, R = S + 1, L tokens per row on this rank, T = B * L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit
from common.distributed.tensor_parallel.cross_entropy import next_token_loss
from common.nn.decoder import Decoder
from common.nn.lora import TokenPlaces
from common.nn.trained_decoder.head import Head

HiddenStates = Callable[[Tensor, TokenPlaces], Tensor]
"""``hidden_states(tokens_BL, places)`` returns the hidden vectors that the head reads."""


@dataclass(frozen=True)
class Llama:
    """Decoder with its loss, for rows that may be split over ranks.

    Attributes:
        decoder: module with the weights.
        hidden_states: function that runs embedding, blocks and last norm.
        head: computes the losses. Under tensor parallelism only its ``chunk`` is used, since each rank has only some of
            the words.
        split: split of the rows over the ranks of cp.
    """

    decoder: Decoder
    hidden_states: HiddenStates
    head: Head
    split: ContextSplit

    def loss(self, tokens_BR: Tensor) -> Tensor:
        """Return this rank's part of the mean loss of all tokens; the sum over the ranks of cp is the whole mean.

        Args:
            tokens_BR: rows of S + 1 tokens, -1 for padding.
        """
        hidden_TE, labels_T = self._hidden(tokens_BR)
        factor = 1.0 / (tokens_BR.shape[0] * self.split.row_length)
        weight = self.decoder.head.weight
        if self.decoder.parallel.size == 1:
            return self.head.summed_loss(hidden_TE, weight, labels_T, factor)
        losses_T = next_token_loss(hidden_TE, weight, labels_T, self.decoder.parallel, self.head.chunk)
        return losses_T.sum() * factor

    @torch.no_grad()
    def losses(self, tokens_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (T,) of this rank's tokens, 0 where not scored, and a mask of scored tokens."""
        hidden_TE, labels_T = self._hidden(tokens_BR)
        weight = self.decoder.head.weight
        if self.decoder.parallel.size == 1:
            return self.head.losses(hidden_TE, weight, labels_T), labels_T >= 0
        return next_token_loss(hidden_TE, weight, labels_T, self.decoder.parallel, self.head.chunk), labels_T >= 0

    def _hidden(self, tokens_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden vectors (T, E), and the labels (T,), which may be tokens of other ranks."""
        rows, length = tokens_BR.shape[0], self.split.row_length
        inputs_BL, labels_BL = self.split.deal(tokens_BR[:, :-1]), self.split.deal(tokens_BR[:, 1:])
        places = TokenPlaces.of(rows, length, self.split.positions(tokens_BR.device))
        return self.hidden_states(inputs_BL.clamp(min=0), places), labels_BL.reshape(-1)
