"""Input side of an adapter in a half with a hand-written backward pass. Shapes as in :mod:`common.nn.decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.nn.frozen_decoder.passing import Tokens
from common.nn.lora import LoraSettings
from common.ops.dropout.reference import DropoutMask
from common.ops.lora_input.reference import Region


@dataclass(frozen=True)
class Adapter:
    """Constants of an adapter. The half receives its matrices A and B as separate arguments.

    Attributes:
        lora: rank, scale and dropout.
        site: call site of the dropout.
        columns: columns of the whole input.
        first_column: first column of this rank's part of the input.
        lora_input: chosen implementation of the operation.
    """

    lora: LoraSettings
    site: int
    columns: int
    first_column: int
    lora_input: Any

    def input(self, x: Tensor, tokens: Tokens, numbers: Tensor) -> Tensor:
        """Return ``dropout(x)``. ``numbers`` are the token numbers of the rows of ``x``."""
        mask = self._mask(tokens)
        if mask is None:
            return x
        result: Tensor = self.lora_input.dropped(x, mask, self._region(numbers))
        return result

    def input_again(
        self, norm: Any, residual_sE: Tensor, inverse_rms_s: Tensor, norm_weight: Tensor, tokens: Tokens
    ) -> Tensor:
        """Recompute ``dropout(x)``, where x is the result of the RMS norm ``norm``, from the tensors that it kept."""
        mask, kept = self._mask(tokens), (residual_sE, inverse_rms_s, norm_weight)
        result: Tensor
        if mask is None:
            result = norm.recompute(*kept)
        else:
            result = self.lora_input.dropped_norm(*kept, mask, self._region(tokens.own_numbers))
        return result

    def add_input_gradient(self, dx: Tensor, du: Tensor, a: Tensor, tokens: Tokens, numbers: Tensor) -> None:
        """Add the adapter's part to the gradient of its input, in place."""
        mask = self._mask(tokens)
        if mask is None:
            dx.addmm_(du, a)
        else:
            self.lora_input.add_input_gradient(dx, du, a, mask, self._region(numbers))

    def _region(self, numbers: Tensor) -> Region:
        return Region(numbers, self.columns, self.first_column)

    def _mask(self, tokens: Tokens) -> DropoutMask | None:
        if tokens.seed is None or self.lora.dropout == 0:
            return None
        return DropoutMask(self.lora.dropout, tokens.seed, self.site)
