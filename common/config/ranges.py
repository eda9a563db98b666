"""Ranges of configuration values, as annotations of a dataclass's fields.

``warmup_steps: Annotated[int, NotNegative]`` declares the allowed values; :func:`common.config.loading.build` rejects
all others. Objects that code constructs directly are not checked. Define a new range at module level beside the class
that uses it: a ``lambda`` inside an annotation cannot see the module's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from common.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """A set of allowed values.

    Attributes:
        needed: description of the allowed values, for messages.
        holds: returns whether a value is allowed. It must return False for NaN: ``0 <= value``, not ``not value < 0``.
    """

    needed: str
    holds: Callable[[Any], bool]

    def check(self, key: str, value: Any) -> None:
        """Check that ``value`` is in the range.

        Raises:
            ConfigError: naming key, value and allowed values.
        """
        if not self.holds(value):
            raise ConfigError(f"{key}={value}: {self.needed}")


class AtLeast(Range):
    """Finite numbers of at least ``least``. ``needed`` replaces the default text of the message."""

    def __init__(self, least: int, needed: str = "") -> None:
        super().__init__(needed or f"at least {least}", lambda value: least <= value < math.inf)


class Between(Range):
    """Numbers from ``least`` to ``most``, both included."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(f"from {least} to {most}", lambda value: least <= value <= most)


class Each(Range):
    """Lists whose entries are all in the range ``entry``."""

    def __init__(self, entry: Range) -> None:
        super().__init__(entry.needed, lambda values: all(entry.holds(value) for value in values))


class Ascending(Range):
    """Lists of numbers, each larger than the one before, of which none is negative.

    Args:
        what: name of the numbers in messages.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} in ascending order, not negative",
            lambda values: Each(NotNegative).holds(values) and all(one < other for one, other in pairwise(values)),
        )


Positive = Range("positive and finite", lambda value: 0 < value < math.inf)
NotNegative = Range("finite and not negative", lambda value: 0 <= value < math.inf)
Finite = Range("finite", math.isfinite)

Probability = Range("a probability", lambda value: 0 <= value <= 1)
ProbabilityBelowOne = Range("a probability below 1", lambda value: 0 <= value < 1)
Share = Range("a share", Probability.holds)
ShareBelowOne = Range("a share below 1", ProbabilityBelowOne.holds)
ShareAboveZero = Range("a share above 0", lambda value: 0 < value <= 1)
Decay = Range("at least 0 and below 1", ProbabilityBelowOne.holds)
"""Factor on a moving average's old value at each update."""
