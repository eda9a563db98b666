"""Ranges of configuration values, as annotations of a dataclass's fields.

``warmup_steps: Annotated[int, NotNegative]`` says what the field takes; :func:`common.config.loading.build` refuses
anything else, and nobody has to check again. Whatever is built without it, in code, is not checked. Name a range of
your own beside the class that uses it: a ``lambda`` inside an annotation does not see the module's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Which values a field takes.

    Attributes:
        needed: what a value is to be, in the words of the message.
        holds: whether a value is. Write it so that it is false of nan: ``0 <= value``, not ``not value < 0``.
    """

    needed: str
    holds: Callable[[Any], bool]

    def check(self, key: str, value: Any) -> None:
        """Refuse what is out of the range.

        Raises:
            ConfigError: naming ``key``, the value and what is needed.
        """
        if not self.holds(value):
            raise ConfigError(f"{key}={value}: {self.needed}")


class AtLeast(Range):
    """Numbers from ``least`` on; ``needed`` where the message is to say more than that."""

    def __init__(self, least: int, needed: str = "") -> None:
        super().__init__(needed or f"at least {least}", lambda value: least <= value < math.inf)


class Between(Range):
    """Numbers from ``least`` to ``most``."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(f"from {least} to {most}", lambda value: least <= value <= most)


class Each(Range):
    """Lists whose entries are all in ``entry``."""

    def __init__(self, entry: Range) -> None:
        super().__init__(entry.needed, lambda values: all(entry.holds(value) for value in values))


Positive = Range("positive and finite", lambda value: 0 < value < math.inf)
NotNegative = Range("not negative", lambda value: 0 <= value < math.inf)
FiniteNotNegative = Range("finite and not negative", NotNegative.holds)
Finite = Range("finite", math.isfinite)

Probability = Range("a probability", lambda value: 0 <= value <= 1)
ProbabilityBelowOne = Range("a probability below 1", lambda value: 0 <= value < 1)
Share = Range("a share", Probability.holds)
ShareBelowOne = Range("a share below 1", ProbabilityBelowOne.holds)
ShareAboveZero = Range("a share above 0", lambda value: 0 < value <= 1)
Decay = Range("at least 0 and below 1", ProbabilityBelowOne.holds)
"""How much of itself a moving average keeps."""
