"""Measure the offsets between the clocks of the nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

ROUNDS = 50


def offset_from_exchanges(exchanges: Sequence[tuple[float, float, float]]) -> float:
    """Return by how many seconds the other clock is ahead of the local one.

    The exchange with the shortest round trip is used. The error is at most half of that round trip (Cristian,
    "Probabilistic clock synchronization", 1989).

    Args:
        exchanges: ``(sent, other, received)`` in seconds; ``other`` by the other clock, the rest by the local clock.
    """
    sent, other, received = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return other - (sent + received) / 2


def measure_offsets(rank: int, others: Sequence[int]) -> list[float]:
    """Return on rank 0 by how many seconds the clock of each rank in ``others`` is ahead of rank 0's clock.

    The default process group must use Gloo. Rank 0 and ``others`` (one rank of each other node) must call this; on
    ranks other than 0 the result is empty.
    """
    offsets = []
    for other in others:
        if rank == 0:
            exchanges = []
            for _ in range(ROUNDS):
                answer = torch.zeros(1, dtype=torch.float64)
                sent = time.time()
                dist.send(torch.zeros(1), other)
                dist.recv(answer, other)
                exchanges.append((sent, float(answer.item()), time.time()))
            offsets.append(offset_from_exchanges(exchanges))
        elif rank == other:
            for _ in range(ROUNDS):
                dist.recv(torch.zeros(1), 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    return offsets
