"""The network: from rows of tokens to the losses of their next tokens.

Legend: B rows, S tokens of one, beside the last one's label, L those that this rank has of it, T = B * L.
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
"""``hidden_states(tokens_BL, places)``: vectors that the head reads."""


@dataclass(frozen=True)
class Llama:
    """A decoder on rows that ranks may share.

    Attributes:
        decoder: has the weights.
        hidden_states: runs embedding, blocks and last norm.
        head: the losses; under tensor parallelism only its chunk counts, each rank having a part of the words.
        split: of the rows over the ranks of cp.
    """

    decoder: Decoder
    hidden_states: HiddenStates
    head: Head
    split: ContextSplit

    def loss(self, tokens_BR: Tensor) -> Tensor:
        """This rank's part of the mean loss of all tokens of the rows; over the ranks of cp parts add up.

        Args:
            tokens_BR: rows of S + 1 tokens, -1 where there is none.
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
        """Losses (T,) of this rank's tokens, 0 where nothing is scored, and whether each is scored."""
        hidden_TE, labels_T = self._hidden(tokens_BR)
        weight = self.decoder.head.weight
        if self.decoder.parallel.size == 1:
            return self.head.losses(hidden_TE, weight, labels_T), labels_T >= 0
        return next_token_loss(hidden_TE, weight, labels_T, self.decoder.parallel, self.head.chunk), labels_T >= 0

    def _hidden(self, tokens_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors that the head reads, and labels (T,). A label may be a token of another rank."""
        rows, length = tokens_BR.shape[0], self.split.row_length
        inputs_BL, labels_BL = self.split.deal(tokens_BR[:, :-1]), self.split.deal(tokens_BR[:, 1:])
        places = TokenPlaces.of(rows, length, self.split.positions(tokens_BR.device))
        return self.hidden_states(inputs_BL.clamp(min=0), places), labels_BL.reshape(-1)
