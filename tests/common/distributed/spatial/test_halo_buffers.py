"""The protocol of the exchange buffers, with ranks as threads that share memory, any of them far ahead."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from common.distributed.spatial.halo import HaloBuffers, HaloMessage
from common.distributed.symmetric_memory import PeerMemory

CAPACITY = 256
DEADLINE = 200.0  # seconds
EXCHANGES = 6


class Node:
    """The buffers and signals of all ranks; tells when a rank has to wait for another."""

    def __init__(self, ranks: int) -> None:
        self.buffers = [torch.zeros(2 * CAPACITY, dtype=torch.uint8) for _ in range(ranks)]
        self.stuck = [threading.Event() for _ in range(ranks)]
        self._raised: set[tuple[int, int, int]] = set()  # at whom, by whom, channel
        self._changed = threading.Condition()

    def when(self, rank: int, ready: Callable[[], bool], change: Callable[[], None]) -> None:
        with self._changed:
            if not ready():
                self.stuck[rank].set()
                assert self._changed.wait_for(ready, DEADLINE), f"rank {rank} waits for ever"
            change()
            self._changed.notify_all()

    def put(self, at: int, by: int, channel: int) -> None:
        signal = (at, by, channel)
        self.when(by, lambda: signal not in self._raised, lambda: self._raised.add(signal))

    def wait(self, at: int, by: int, channel: int) -> None:
        signal = (at, by, channel)
        self.when(at, lambda: signal in self._raised, lambda: self._raised.discard(signal))


class Handle:
    """One rank's view, with the methods of PyTorch's handle."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        start = storage_offset * dtype.itemsize
        return self._node.buffers[rank][start : start + sizes.numel() * dtype.itemsize].view(dtype).view(sizes)

    def put_signal(self, dst_rank: int, channel: int) -> None:
        self._node.put(dst_rank, self._rank, channel)

    def wait_signal(self, src_rank: int, channel: int) -> None:
        self._node.wait(self._rank, src_rank, channel)


def memory(node: Node, rank: int, ranks: int) -> PeerMemory:
    return PeerMemory(node.buffers[rank], Handle(node, rank), rank, ranks)


def plane(rank: int, exchange: int, peer: int) -> Tensor:
    """What a rank sends to a peer; sizes and dtypes differ from exchange to exchange."""
    shape = (1, 2, 2 + exchange % 3, 3)
    dtype = (torch.float32, torch.bfloat16)[exchange % 2]
    return torch.full(shape, 10 * exchange + 3 * rank + peer, dtype=dtype)


def run_rank(node: Node, rank: int, ranks: int, directions: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """What a rank received, and what it should have."""
    buffers = HaloBuffers(memory(node, rank, ranks))
    found = []
    for exchange in range(EXCHANGES):
        targets = [rank + step for step in directions if 0 <= rank + step < ranks]
        sources = [rank - step for step in directions if 0 <= rank - step < ranks]
        sends = [HaloMessage(peer, plane(rank, exchange, peer)) for peer in targets]
        receives = [HaloMessage(peer, torch.empty_like(plane(peer, exchange, rank))) for peer in sources]
        buffers.exchange(sends, receives)
        found += [(message.plane, plane(message.peer, exchange, rank)) for message in receives]
    node.stuck[rank].set()
    return found


@pytest.mark.parametrize("directions", [(1, -1), (1,), (-1,)], ids=["both", "to_next", "to_previous"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_every_plane_arrives_whoever_is_ahead(order, directions):
    node = Node(3)
    with ThreadPoolExecutor(3) as pool:
        futures = {}
        for rank in order:  # each rank runs until it has to wait before the next one begins
            futures[rank] = pool.submit(run_rank, node, rank, 3, directions)
            assert node.stuck[rank].wait(DEADLINE)
        results = [future.result(DEADLINE) for future in futures.values()]
    for received, expected in itertools.chain.from_iterable(results):
        assert torch.equal(received, expected)


def test_buffers_of_the_two_neighbours_do_not_overlap():
    node = Node(3)
    with ThreadPoolExecutor(3) as pool:
        everyone = [pool.submit(HaloBuffers, memory(node, rank, 3)) for rank in range(3)]
        first, middle, last = (future.result(DEADLINE) for future in everyone)
        full = CAPACITY // 4
        sent = [torch.full((full,), 1.0), torch.full((full,), 2.0)]
        received = [torch.empty(full), torch.empty(full)]
        first.exchange([HaloMessage(1, sent[0])], [])
        last.exchange([HaloMessage(1, sent[1])], [])
        middle.exchange([], [HaloMessage(0, received[0]), HaloMessage(2, received[1])])
    assert torch.equal(received[0], sent[0])
    assert torch.equal(received[1], sent[1])
