"""Seeds of scored runs: drawn from the operating system, different for each experiment, logged by the trainer."""

from __future__ import annotations

import os

SEED_BITS = 52
"""Bits of a drawn seed. Even with the experiment number added, it is exact in JSON readers that use float64."""

_INT64_MAX = 2**63 - 1


def draw_seed() -> int:
    """Draw a base seed from the operating system's entropy, uniformly from 1 to 2**52.

    The rules allow seeds only from the clock or from sources such as /dev/urandom (training rules, random numbers).
    """
    return 1 + int.from_bytes(os.urandom(8), "little") % 2**SEED_BITS


def experiment_seed(base: int, experiment: int) -> int:
    """Return the seed of one experiment of a set: ``base + experiment - 1``.

    Args:
        base: seed of the whole set, 0 or more.
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
