"""How far the clocks of the nodes are apart."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

ROUNDS = 50


def offset_from_exchanges(exchanges: Sequence[tuple[float, float, float]]) -> float:
    """Seconds that the other clock is ahead, from ``(sent, other's time, received)`` by the own clock.

    Taken from the exchange with the shortest round trip, of which half is the way there; the error is at most half of
    that round trip (Cristian, "Probabilistic clock synchronization", 1989).
    """
    sent, other, received = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return other - (sent + received) / 2


def measure_offsets(rank: int, others: Sequence[int]) -> list[float]:
    """On rank 0: seconds that the clock of each rank in ``others`` is ahead of its own; they answer. Over Gloo.

    The ranks in ``others`` are one of each other node; ranks besides take no part.
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
