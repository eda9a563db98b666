"""Exchange of gradients and weights by copy engines, between ranks that map each other's memory.

Collectives of NCCL occupy multiprocessors, also while they wait for other ranks. Copy engines occupy none, and ranks
wait for each other only at two barriers of an iteration.

**Memory.** Of each flat buffer a rank shares the weights of its shard, and one staging slot for each other rank, as
large as the gradients of the shard. The first slot later holds the sums, so it takes the place of
``Shard.gradients``, and two ranks need no additional memory.

**Reduction.** A rank pushes the pieces of a bucket, as soon as its gradients are final, into its slots at their owners.
After a barrier each rank adds its own piece and the staged ones in fp32 and rounds once. Where gradients are clipped
before the reduction, a rank may push them unclipped and send its factor at the end. The sum then multiplies each piece
by the factor of its rank, rounded as a clipped gradient is.

**Gathering.** A rank pulls the pieces of a bucket from the shards of the others.

**When memory is written again.** The barrier at the beginning of an iteration follows the update, which was the last to
read the slots and to write the weights. The barrier after the backward pass follows all pulls, and the next update of
the weights follows that barrier.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import ConfigError
from common.ops.triton_support import no_triton
from common.optim.buffers import ALIGNMENT_BYTES, Bucket, FlatBuffer

COPY_ENGINES = "copy_engines"
"""Value of ``optimizer.exchange`` that selects this module."""


class Transfer(Protocol):
    """Enqueued transfers."""

    def wait(self) -> object:
        """Wait for them; on a GPU the current stream waits, not the host."""


@dataclass(frozen=True)
class _Copied:
    event: torch.cuda.Event | None

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


Copy = tuple[Tensor, Tensor]
"""Target and source of a copy."""


@dataclass(frozen=True)
class PeerPieces:
    """The copies of one bucket.

    Attributes:
        pushes: copies of this rank's gradients into the slots of other ranks.
        staged: gradients for this rank's piece that other ranks push: [ranks, elements of the piece].
        pulls: copies of all ranks' pieces into this rank's flat weights.
    """

    pushes: tuple[Copy, ...]
    staged: Tensor
    pulls: tuple[Copy, ...]


class PeerExchange:
    """Memory that the ranks of ``group`` map from each other, and copies between it. The constructor is collective.

    It moves the shards of ``buffers`` into this memory, so build it before anything keeps their tensors.

    Args:
        group: ranks that share the shards of ``buffers``; two or more, on one machine.

    Attributes:
        size: bytes of the memory on each rank.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory, or lack it.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup) -> None:
        device, ranks = buffers[0].device, group.size()
        self._rank, self._ranks = group.rank(), ranks
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        widest = functools.reduce(torch.promote_types, (buffer.dtype for buffer in buffers), torch.float32)
        elements = [buffer.shard.parameters.numel() for buffer in buffers]
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((ranks - 1,), widest)]
        for count, buffer in zip(elements, buffers, strict=True):
            shapes += [((count,), buffer.dtype), ((ranks - 1, count), buffer.gradients.dtype)]
        starts = [0]
        for shape, dtype in shapes:
            size = math.prod(shape) * dtype.itemsize
            starts.append(starts[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        self.size = starts[-1]
        self._memory = PeerMemory.allocate(self.size, group, device)
        parts = [self._memory.tensors(*part, start) for part, start in zip(shapes, starts, strict=False)]
        self._factors, self._weights, self._slots = parts[0], parts[1::2], parts[2::2]
        for buffer, weights, slots in zip(buffers, self._weights, self._slots, strict=True):
            slots[self._rank].zero_()
            buffer.move_shard(weights[self._rank], slots[self._rank][0])

    def pieces(self, number: int, buffer: FlatBuffer, bucket: Bucket, every: int = 1) -> PeerPieces:
        """Return the copies of ``bucket``, which belongs to ``buffer``, the buffer with this number.

        Args:
            every: ranks whose distance is a multiple of it have different gradients, the others the same.
        """
        size = bucket.own.stop - bucket.own.start
        mine, own = bucket.in_shard, self._rank
        gradients = buffer.gradients[bucket.start : bucket.stop].split(size)
        weights = buffer.parameters[bucket.start : bucket.stop].split(size)
        pushes = []
        for distance in range(every, self._ranks, every):
            peer = (own + distance) % self._ranks
            pushes.append((self._slots[number][peer][self._slot(distance), mine], gradients[peer]))
        ranks = [(own + distance) % self._ranks for distance in range(self._ranks)]
        pulls = tuple((weights[rank], self._weights[number][rank][mine]) for rank in ranks)
        return PeerPieces(tuple(pushes), self._slots[number][own][every - 1 :: every, mine], pulls)

    def _slot(self, distance: int) -> int:
        """Return the slot for this rank's gradients at the rank that comes ``distance`` ranks after it."""
        return self._ranks - 1 - distance

    def meet(self) -> Transfer:
        """Start a barrier of all ranks. It follows all copies, and the work of the current stream so far."""
        with self._beside():
            self._memory.barrier()
            return self._started()

    def copy(self, copies: Iterable[Copy]) -> Transfer:
        """Start copies, one after the other. They follow the work of the current stream so far."""
        with self._beside():
            for target, source in copies:
                target.copy_(source)
            return self._started()

    def send_factor(self, factor: Tensor) -> None:
        """Start to send this rank's factor (0-d), which :meth:`factors` of the other ranks have after a barrier."""
        distances = range(1, self._ranks)
        targets = [self._factors[(self._rank + d) % self._ranks][self._slot(d)] for d in distances]
        self.copy((target, factor) for target in targets)

    @property
    def factors(self) -> Tensor:
        """Factors of the other ranks, [ranks - 1], in the order of :attr:`PeerPieces.staged`."""
        return self._factors[self._rank]

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _started(self) -> _Copied:
        return _Copied(None if self._stream is None else self._stream.record_event())


def build_exchange(buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None) -> PeerExchange | None:
    """Return the exchange over the ranks that share shards; None if it is this rank alone. Collective.

    Raises:
        ConfigError: the ranks cannot map each other's memory; the message says why. All ranks raise it.
    """
    if group is None:
        return None
    exchange, reason = attempt(lambda: PeerExchange(buffers, group), group, buffers[0].device)
    if exchange is None:
        raise ConfigError(
            f"optimizer.exchange={COPY_ENGINES}: {reason}; use optimizer.exchange=collectives, or on several machines "
            "optimizer.shard=node, with which only the ranks of one machine share"
        )
    return exchange


def add_pieces(own: Tensor, staged: Tensor, result: Tensor, factor: Tensor | None, factors: Tensor) -> None:
    """Add this rank's piece and the staged ones in fp32 (fp64 for fp64), and round once.

    Args:
        own: (elements,), contiguous.
        staged: (ranks, elements); elements are contiguous. It may be empty.
        result: (elements,), contiguous, in the dtype of ``own``; may be one of the staged pieces.
        factor, factors: 0-d, and (ranks,): factors of the own and the staged pieces. Each product is rounded to the
            dtype of the gradients. Without ``factor`` nothing is multiplied.
    """
    if own.is_cuda and factors.dtype == torch.float32 and no_triton(own.device) is None:
        from common.optim import update_triton  # triton is imported only where it is used

        update_triton.add_pieces(own, staged, result, factor, factors)
        return
    pieces = [own, *staged]
    if factor is not None:
        pieces = [piece * by for piece, by in zip(pieces, (factor, *factors), strict=True)]
    wide = torch.promote_types(own.dtype, torch.float32)
    result.copy_(sum((piece.to(wide) for piece in pieces[1:]), start=pieces[0].to(wide)))
