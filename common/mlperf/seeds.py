"""Seeds of scored runs: drawn from the operating system, distinct for each experiment, logged by the trainer."""

from __future__ import annotations

import os

SEED_BITS = 52
"""Bits of a drawn seed: with the experiment number added it stays exact in a JSON reader that uses float64."""

_INT64_MAX = 2**63 - 1


def draw_seed() -> int:
    """Draw a base seed from the operating system's entropy: uniform over 1 .. 2**52.

    The rules allow seeds from the clock or from /dev/urandom-like sources only (training rules, random numbers).
    """
    return 1 + int.from_bytes(os.urandom(8), "little") % 2**SEED_BITS


def experiment_seed(base: int, experiment: int) -> int:
    """The seed of one experiment of a set: ``base + experiment - 1``.

    Args:
        base: seed, 0 or more, of the whole set: the launcher drew it once, or was given it.
        experiment: number of the experiment, counted from 1.

    Raises:
        ValueError: if ``base`` is negative, ``experiment`` is not positive, or the sum leaves the int64 range.
    """
    if base < 0:
        raise ValueError(f"a base seed must not be negative, got {base}")
    if experiment < 1:
        raise ValueError(f"experiments are counted from 1, got {experiment}")
    seed = base + experiment - 1
    if seed > _INT64_MAX:
        raise ValueError(f"seed {base} + {experiment} - 1 does not fit into 63 bits")
    return seed
