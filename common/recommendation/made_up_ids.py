"""Ids of made-up samples: uniform over their tables, or skewed as click logs are.

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
"""Of the skewed ids: the k-th of a table is drawn with a probability proportional to k to the minus this."""
PLACES = 1 << 10
"""Sites of random bits for a table: one for each of a bag's ids."""


def made_up_ids(tables: Tables, samples: int, distribution: Distribution, generator: torch.Generator) -> Tensor:
    """Ids of all tables.

    Args:
        tables: of the ids.
        samples: B.
        distribution: ``uniform``, each id by itself; or ``zipf`` of the first id of a bag, which the others follow: as
            in the multi-hot set of DLRM-DCNv2, they are uniform, and the same whenever the first one is.
        generator: of the CPU.

    Returns:
        int32 (B, L), on the CPU.
    """
    draw = _uniform if distribution == "uniform" else _skewed
    columns = [draw(table, number, samples, generator) for number, table in enumerate(tables.tables)]
    return torch.cat(columns, dim=1)


def _uniform(table: Table, number: int, samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(table.rows, (samples, table.hotness), generator=generator, dtype=torch.int32)


def _skewed(table: Table, number: int, samples: int, generator: torch.Generator) -> Tensor:
    """The first by the inverse of the distribution: host memory of 16 bytes a row meanwhile."""
    shares_R = torch.arange(1, table.rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum_(0)
    chance_B1 = torch.rand((samples, 1), generator=generator, dtype=torch.float64)
    first_B1 = torch.searchsorted(shares_R, chance_B1 * shares_R[-1]).clamp_(max=table.rows - 1)
    site = number * PLACES + torch.arange(1, table.hotness)
    bits = words(first_B1, torch.zeros((), dtype=torch.int64), site).long() & 0xFFFFFFFF
    return torch.cat([first_B1, bits % table.rows], dim=1).int()
