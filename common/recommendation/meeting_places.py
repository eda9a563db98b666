"""Positions of vectors received from several senders, and which of them add up to one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.ops.embedding_bags import Bag, Bags


@dataclass(frozen=True)
class Places:
    """Positions of the vectors of B samples.

    Attributes:
        parts_BP: int32, rows of the received buffer that add up to the vectors of a sample, table by table.
        sums: bags of these rows, one per table; None without tables.
        sent_M: int64, for every vector that goes back to a sender, sender by sender and sample by sample, its row
            among the vectors of all samples.
    """

    parts_BP: Tensor
    sums: Bags | None
    sent_M: Tensor


def places(
    batch: int, tables: int, senders: Sequence[Sequence[int]], leading: int, device: torch.device | str
) -> Places:
    """Return the positions for a batch. Copies to the device, so call it outside of captures.

    Args:
        batch: B.
        tables: number of tables; each has a sender.
        senders: for each sender, the tables that it sends for every sample.
        leading: number of vectors of a sample before those of the tables.
    """
    sample_B = torch.arange(batch)
    parts: list[list[Tensor]] = [[] for _ in range(tables)]
    sent: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    before = 0
    for numbers in senders:
        for place, table in enumerate(numbers):
            parts[table].append(before + sample_B * len(numbers) + place)
        if numbers:
            vector_K = leading + torch.tensor(list(numbers))
            sent.append((sample_B.unsqueeze(1) * (leading + tables) + vector_K).flatten())
        before += batch * len(numbers)
    bags: list[Bag] = []
    for found in parts:
        bags.append(Bag(sum(bag.hotness for bag in bags), len(found), 0, before))
    flat = [part for found in parts for part in found]
    parts_BP = torch.stack(flat, 1).to(device, torch.int32) if flat else torch.empty(batch, 0, dtype=torch.int32)
    return Places(parts_BP, Bags(bags, device) if bags else None, torch.cat(sent).to(device))
