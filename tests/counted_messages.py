"""Count the bytes that a rank sends to ranks of its own node and to other nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

FLAG_BYTES = 64
"""Messages of fewer bytes are flags and norms, and are not counted."""


@dataclass
class Sent:
    """Bytes that one rank has sent.

    Attributes:
        inside: bytes to other ranks of its node.
        between: bytes to ranks of other nodes.
    """

    inside: int = 0
    between: int = 0

    def __str__(self) -> str:
        return f"{self.inside:>9,} inside a node, {self.between:>9,} between nodes"


@contextlib.contextmanager
def counted(rank: int, ranks_per_node: int) -> Iterator[Sent]:
    """Count the bytes of collectives that the block launches.

    An all-to-all sends each piece directly. All other collectives are rings in the order of the ranks, as NCCL's are: a
    rank sends to the next one, once for a scatter or a gather, twice for an all-reduce.
    """
    sent = Sent()

    def count(other: int, size: int) -> None:
        if other != rank and other // ranks_per_node == rank // ranks_per_node:
            sent.inside += size
        elif other != rank:
            sent.between += size

    def ring(group: dist.ProcessGroup | None, piece: float, rounds: int) -> None:
        members = dist.get_process_group_ranks(group)
        size = rounds * (len(members) - 1) * int(piece)
        if size >= FLAG_BYTES:
            count(members[(members.index(rank) + 1) % len(members)], size)

    to_all, gather, scatter, reduce = (
        dist.all_to_all_single, dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_reduce
    )  # fmt: skip

    def all_to_all_single(
        received: Tensor, pieces: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
    ) -> Any:
        for other, elements in zip(dist.get_process_group_ranks(group), send, strict=True):
            count(other, elements * pieces.itemsize)
        return to_all(received, pieces, receive, send, group=group)

    def all_gather_into_tensor(whole: Tensor, piece: Tensor, group: Any = None, **options: Any) -> Any:
        ring(group, piece.nbytes, 1)
        return gather(whole, piece, group=group, **options)

    def reduce_scatter_tensor(piece: Tensor, whole: Tensor, group: Any = None, **options: Any) -> Any:
        ring(group, piece.nbytes, 1)
        return scatter(piece, whole, group=group, **options)

    def all_reduce(values: Tensor, group: Any = None, **options: Any) -> Any:
        ring(group, values.nbytes / len(dist.get_process_group_ranks(group)), 2)
        return reduce(values, group=group, **options)

    replaced = (all_to_all_single, all_gather_into_tensor, reduce_scatter_tensor, all_reduce)
    with mock.patch.multiple(dist, **{function.__name__: function for function in replaced}):
        yield sent
