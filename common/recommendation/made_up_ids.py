"""Ids of synthetic samples: uniform over their tables, or skewed like click logs.

B samples, L ids of a sample.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from common.ops.random_bits.reference import words
from common.recommendation.tables import Table, Tables

Distribution = Literal["uniform", "zipf"]
EXPONENT = 1.05
"""Exponent of the skewed ids: the k-th id of a table has a probability proportional to k ** -EXPONENT."""
PLACES = 1 << 10
"""Sites of random bits per table: one for each id of a bag."""


def made_up_ids(tables: Tables, samples: int, distribution: Distribution, generator: torch.Generator) -> Tensor:
    """Return random ids for all tables.

    Args:
        samples: B.
        distribution: ``uniform``: all ids are independent. ``zipf``: the first id of a bag is skewed. The others are
            a uniform function of the first, as in the multi-hot set of DLRM-DCNv2.
        generator: generator on the CPU.

    Returns:
        int32 (B, L), on the CPU.
    """
    draw = _uniform if distribution == "uniform" else _skewed
    columns = [draw(table, number, samples, generator) for number, table in enumerate(tables.tables)]
    return torch.cat(columns, dim=1)


def _uniform(table: Table, number: int, samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(table.rows, (samples, table.hotness), generator=generator, dtype=torch.int32)


def _skewed(table: Table, number: int, samples: int, generator: torch.Generator) -> Tensor:
    """Draw the first id by inverting the distribution, which temporarily needs 16 bytes of host memory per row."""
    shares_R = torch.arange(1, table.rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum_(0)
    chance_B1 = torch.rand((samples, 1), generator=generator, dtype=torch.float64)
    first_B1 = torch.searchsorted(shares_R, chance_B1 * shares_R[-1]).clamp_(max=table.rows - 1)
    site = number * PLACES + torch.arange(1, table.hotness)
    bits = words(first_B1, torch.zeros((), dtype=torch.int64), site).long() & 0xFFFFFFFF
    return torch.cat([first_B1, bits % table.rows], dim=1).int()
