"""The heads that learn, and how far the gradients of their weights are from float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.head import NextTokenHead, TiedHead, UntiedHead
from common.ops import cross_entropy
from common.ops.operation import AUTO, OperationRequest
from tests.generators import generator_of

SummedLoss = Callable[[nn.Parameter, Tensor, Tensor, int], Tensor]
"""``summed_loss(weight_VE, hidden_TE, labels_T, chunk)``."""


def shared_head(weight_VE: nn.Parameter, hidden_TE: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
    """The head whose words ranks share."""
    return NextTokenHead(weight_VE, TensorParallel(), chunk).summed_loss(hidden_TE, labels_T)


def decoders_head(weight_VE: nn.Parameter, hidden_TE: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
    """The head of one rank."""
    request = OperationRequest(weight_VE.device, weight_VE.dtype)
    function = cross_entropy.CROSS_ENTROPY.select(AUTO, request).function
    return UntiedHead(weight_VE, function, chunk).summed_loss(hidden_TE, labels_T)


def tied_head(weight_VE: nn.Parameter, hidden_TE: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
    """An embedding that is the head, too."""
    request = OperationRequest(weight_VE.device, weight_VE.dtype)
    function = cross_entropy.OF_A_PART.select(AUTO, request).function
    head = TiedHead(weight_VE, len(weight_VE), TensorParallel(), function, finishes=True, chunk=chunk)
    return head.summed_loss(hidden_TE, labels_T)


HEADS: dict[str, SummedLoss] = {"shared": shared_head, "of one rank": decoders_head, "tied": tied_head}


@dataclass(frozen=True)
class Case:
    """Sizes; ``words`` a power of two up to 256: bf16 has every probability of a weight of zeros, and one less it."""

    tokens: int
    chunk: int
    words: int
    hidden: int
    device: torch.device

    def zeros(self) -> Tensor:
        """A weight for which all words are as likely: bf16 has the logits' gradients exactly."""
        return torch.zeros(self.words, self.hidden, dtype=torch.bfloat16, device=self.device)

    def drawn(self) -> Tensor:
        """Any other weight."""
        return self._normal("weight", self.words)

    def given(self, weight_VE: Tensor, dtype: torch.dtype) -> tuple[nn.Parameter, Tensor, Tensor]:
        """A weight whose gradient adds up in ``dtype``, hidden vectors and labels."""
        weight = nn.Parameter(weight_VE.clone())
        weight.grad_dtype = dtype
        hidden_TE = self._normal("hidden", self.tokens).add_(0.5).requires_grad_()
        return weight, hidden_TE, torch.arange(self.tokens, device=self.device) ** 2 % self.words

    def gradient_and_error(self, head: str, weight_VE: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
        """The gradient of the weight, which adds up in ``dtype``, and its relative distance from float64."""
        weight, hidden_TE, labels_T = self.given(weight_VE, dtype)
        HEADS[head](weight, hidden_TE, labels_T, self.chunk).backward()
        exact = weight.detach().double().requires_grad_()
        logits_TV = hidden_TE.detach().double() @ exact.t()
        torch.nn.functional.cross_entropy(logits_TV, labels_T, reduction="sum").backward()
        assert weight.grad is not None
        assert exact.grad is not None
        assert weight.grad.dtype == dtype
        return weight.grad, float((weight.grad.double() - exact.grad).norm() / exact.grad.norm())

    def _normal(self, name: str, rows: int) -> Tensor:
        return torch.randn(rows, self.hidden, generator=generator_of(name)).bfloat16().to(self.device)
