"""Partition of a flat buffer over the ranks that share it: each rank updates one piece of every bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.optim.flat import HALF_DTYPES, Bucket, FlatBuffer
from common.optim.shard import Fragment, Shard


@dataclass(frozen=True)
class Piece:
    """This rank's part of one bucket.

    Attributes:
        inside: its slice of the flat buffer.
        place: its slice of the shard's flat tensors.
    """

    bucket: Bucket
    inside: slice
    place: slice


class Partition:
    """One flat buffer and this rank's shard of it.

    Args:
        buffer: a buffer that was built with ``pieces=ranks``.
        ranks: number of ranks that share the buffer.
        index: position of this rank among them.
        first_tensor: number of the buffer's first tensor among the tensors of all buffers.
        remainders: keep masters of bfloat16 parameters as int16 remainders (:func:`common.optim.shard.split_masters`).

    Attributes:
        shard: with one rank it holds the buffer's tensors, else copies of this rank's pieces.
        pieces: one for each bucket, in the order of the buffer.
        tensors: number of tensors that the buffer's parameters count as.
    """

    def __init__(self, buffer: FlatBuffer, ranks: int, index: int, first_tensor: int, remainders: bool = False) -> None:
        self.buffer = buffer
        self.pieces = _pieces(buffer, ranks, index)
        self.tensors = sum(segment.parts for segment in buffer.segments)
        parameters, gradients = buffer.parameters, buffer.gradients
        if ranks > 1:
            parameters = torch.cat([parameters[piece.inside] for piece in self.pieces])
            gradients = torch.zeros_like(parameters, dtype=buffer.gradients.dtype)
        if remainders and buffer.dtype == torch.bfloat16:
            masters = torch.zeros_like(parameters, dtype=torch.int16)
        else:
            masters = parameters.float() if buffer.dtype in HALF_DTYPES else parameters
        self.shard = Shard(parameters, gradients, masters, _fragments(buffer, self.pieces, first_tensor))

    @property
    def is_whole(self) -> bool:
        """Whether this rank updates everything. The shard's tensors are then the buffer's tensors."""
        return self.shard.parameters is self.buffer.parameters

    def take(self, flat: Tensor, out: Tensor) -> None:
        """Copy this rank's pieces of ``flat``, in the buffer's layout, into ``out``, in the shard's layout."""
        torch._foreach_copy_([out[p.place] for p in self.pieces], [flat[p.inside] for p in self.pieces])

    def read_parameters(self) -> None:
        """Set the shard's parameters and masters to the model's weights, after other code changed these."""
        if not self.is_whole:
            self.take(self.buffer.parameters, self.shard.parameters)
        if self.shard.has_remainders:
            self.shard.masters.zero_()
        elif self.shard.has_masters:
            self.shard.masters.copy_(self.shard.parameters)


def build_partitions(
    buffers: Sequence[FlatBuffer], ranks: int, index: int, remainders: bool = False
) -> list[Partition]:
    """Return a Partition for each buffer. Tensors are numbered through all buffers.

    Args:
        ranks, index, remainders: see :class:`Partition`.
    """
    partitions: list[Partition] = []
    for buffer in buffers:
        partitions.append(Partition(buffer, ranks, index, sum(p.tensors for p in partitions), remainders))
    return partitions


def _pieces(buffer: FlatBuffer, ranks: int, index: int) -> list[Piece]:
    pieces, place = [], 0
    for bucket in buffer.buckets:
        length = (bucket.stop - bucket.start) // ranks
        start = bucket.start + index * length
        pieces.append(Piece(bucket, slice(start, start + length), slice(place, place + length)))
        place += length
    return pieces


def _fragments(buffer: FlatBuffer, pieces: Sequence[Piece], first_tensor: int) -> tuple[Fragment, ...]:
    fragments: list[Fragment] = []
    tensor = first_tensor
    for piece in pieces:
        shift = piece.place.start - piece.inside.start
        for segment in piece.bucket.segments:
            size = segment.numel // segment.parts
            for part in range(segment.parts):
                start = segment.start + part * size
                padded = segment.stop if part == segment.parts - 1 else start + size
                first, end = max(start, piece.inside.start), min(start + size, piece.inside.stop)
                if first < end:
                    stop = min(padded, piece.inside.stop)
                    fragments.append(Fragment(tensor, segment.group, first + shift, end - first, stop + shift))
                tensor += 1
    return tuple(fragments)
