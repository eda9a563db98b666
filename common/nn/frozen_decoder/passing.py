"""What passes between the halves of a frozen decoder. Shapes as in :mod:`common.nn.decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor, Scaling


@dataclass
class Handover:
    """The gradient of a half's result in FP8, made by the norm that reads the result.

    Attributes:
        scaling: of this gradient; None where it is cast later, or stays in 16 bits.
        gradient: what the norm's backward pass left for the half.
    """

    scaling: Scaling | None
    gradient: Fp8Tensor | None = None

    def take(self) -> Fp8Tensor | None:
        """The gradient, once."""
        taken, self.gradient = self.gradient, None
        return taken


class Pair(NamedTuple):
    """What a half takes and gives.

    Attributes:
        residual: the residual stream of own tokens (s, E).
        delta: what is to be added to it (s, E); None before the first block.
        handover: of the delta's gradient.
    """

    residual: Tensor
    delta: Tensor | None
    handover: Handover | None


@dataclass(frozen=True)
class Tokens:
    """What all blocks need to know of a micro-batch's tokens.

    Attributes:
        rows: B.
        numbers: (T,), see :class:`common.nn.lora.TokenPlaces`.
        own_numbers: (s,), those of own tokens.
        cos, sin: (T, D / 2), the rotation.
        seed: of the dropout; None in an evaluation, in which scales rest as well.
    """

    rows: int
    numbers: Tensor
    own_numbers: Tensor
    cos: Tensor
    sin: Tensor
    seed: Tensor | None

    @property
    def resting(self) -> bool:
        """Whether FP8 scales are used and not moved."""
        return self.seed is None
