"""Transfer of weights from training ranks to evaluation ranks while training continues.

At an evaluation point a sender copies the weights into a snapshot on the training stream. A side stream copies its
piece of the snapshot to pinned host memory by the GPU's copy engine; a thread waits for this copy and sends the piece
over Gloo. No kernel waits, so the transfer occupies no multiprocessor of the training GPUs, and training waits only if
the previous transfer has not finished.

The evaluation ranks form rows with one rank per sender. Sender ``g`` broadcasts piece ``g`` to the ``g``-th rank of
every row, and the ranks of a row gather the pieces on their devices. A thread receives into one of two host buffers:
new weights arrive while the previous ones are evaluated, and later ones wait at their sender.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import groups
from common.distributed.groups import HostGroup

ALIGNMENT = 256  # alignment of tensors and pieces, in bytes
HOST_BUFFERS = 2
PUBLISH, END = 1, 2


@dataclass(frozen=True)
class Template:
    """Offsets of tensors in a flat byte buffer that is cut into equal pieces.

    Attributes:
        entries: name, shape, name of the dtype and byte offset of each tensor.
        piece_bytes: size of each piece; the last one is padded.
    """

    entries: tuple[tuple[str, tuple[int, ...], str, int], ...]
    pieces: int
    piece_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], pieces: int) -> Template:
        """Return the template of ``tensors``, in their order."""
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entries.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset))
            offset += _aligned(tensor.numel() * tensor.element_size())
        return cls(tuple(entries), pieces, _aligned(math.ceil(max(offset, 1) / pieces)))

    @property
    def bytes(self) -> int:
        """Return the size of the buffer in bytes."""
        return self.pieces * self.piece_bytes

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors in ``buffer`` (uint8, ``bytes`` long), by name."""
        views = {}
        for name, shape, dtype_name, offset in self.entries:
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = math.prod(shape) * dtype.itemsize
            views[name] = buffer[offset : offset + size].view(dtype).view(shape)
        return views

    def encode(self) -> str:
        """Return the template as JSON."""
        return json.dumps([self.entries, self.pieces, self.piece_bytes])

    @classmethod
    def decode(cls, text: str) -> Template:
        """Return the template from the result of :meth:`encode`."""
        entries, pieces, piece_bytes = json.loads(text)
        return cls(
            tuple((name, tuple(shape), dtype, offset) for name, shape, dtype, offset in entries), pieces, piece_bytes
        )


@dataclass(frozen=True)
class Transfer:
    """Assignment of senders to receivers.

    Attributes:
        token: text that is unique to this run among all runs that use the same store.
        senders: number of senders: training ranks 0 to ``senders`` - 1 send one piece each.
        evaluation_ranks: number of ranks that receive.
    """

    token: str
    senders: int
    evaluation_ranks: int

    def group(self, member: int, sender: int) -> HostGroup:
        """Return the group of a sender (rank 0) and its evaluation ranks; ``member``: this process's rank in it."""
        return HostGroup(f"weights/{self.token}/{sender}", member, 1 + self.evaluation_ranks // self.senders)


def senders_for(evaluation_ranks: int, training_ranks_of_first_node: int) -> int:
    """Return the number of senders: the largest divisor of ``evaluation_ranks`` that fits on the first node."""
    return max(n for n in range(1, training_ranks_of_first_node + 1) if evaluation_ranks % n == 0)


class WeightSender:
    """Sender of weights on one of the sending ranks. Other training ranks do not create one.

    Args:
        sender: index of this rank among the senders.
    """

    def __init__(self, transfer: Transfer, sender: int, template: Template, device: torch.device) -> None:
        self._group = transfer.group(0, sender)
        cuda = device.type == "cuda"
        self._snapshot = torch.zeros(template.bytes, dtype=torch.uint8, device=device)
        self._views = template.views(self._snapshot)
        first = sender * template.piece_bytes
        self._piece = self._snapshot[first : first + template.piece_bytes]
        # Without a GPU the snapshot is already in host memory.
        self._host = torch.zeros(self._piece.shape, dtype=torch.uint8, pin_memory=True) if cuda else self._piece
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._orders: queue.SimpleQueue[tuple[list[int], torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="weights to evaluation ranks", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def publish(self, index: int, samples: int, weights: Mapping[str, Tensor]) -> None:
        """Send ``weights``. They may change after the work that this call enqueues on the current stream.

        Waits until the previous weights have been sent.

        Args:
            samples: number of training samples that the weights have seen.

        Raises:
            RuntimeError: a receiver is gone.
        """
        self._await_idle()
        torch._foreach_copy_(list(self._views.values()), [weights[name] for name in self._views])
        done = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._host.copy_(self._piece, non_blocking=True)
                done = torch.cuda.Event(blocking=True)
                done.record()
        self._idle.clear()
        self._orders.put(([PUBLISH, index, samples], done))

    def end(self, stopped_at: int) -> None:
        """Wait until all weights are sent, and tell the receivers that no more follow.

        Args:
            stopped_at: step at which a signal stopped the run; 0 for a run that ended by itself.

        Raises:
            RuntimeError: a receiver is gone.
        """
        self._await_idle()
        self._orders.put(([END, stopped_at, 0], None))
        self._orders.put(None)
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of the sending thread, if there is one."""
        if self._error is not None:
            raise self._error

    def _await_idle(self) -> None:
        self._idle.wait()
        self.check()

    def _send(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                header, copied = order
                if copied is not None:
                    copied.synchronize()
                self._group.broadcast(torch.tensor(header))
                if header[0] == PUBLISH:
                    self._group.broadcast(self._host)
                self._idle.set()
        except RuntimeError as error:
            self._error = error
            self._idle.set()


@dataclass(frozen=True)
class Arrived:
    """Received weights.

    Attributes:
        samples: number of training samples that the weights have seen.
        seconds: duration of the broadcast in seconds, without the wait for a free buffer.
        buffer: this rank's piece, in host memory.
    """

    index: int
    samples: int
    seconds: float
    buffer: Tensor


@dataclass(frozen=True)
class Ended:
    """End of the transfers. ``stopped_at`` is the step at which a signal stopped training, or 0."""

    stopped_at: int


class WeightReceiver:
    """Receiver of weights on an evaluation rank. All ranks of the role must create one.

    Args:
        rank: rank among the evaluation ranks.
        device: device for the assembled weights.
    """

    def __init__(self, transfer: Transfer, rank: int, template: Template, device: torch.device) -> None:
        row, sender = divmod(rank, transfer.senders)
        self._row = _row_group(row, transfer)
        self._whole = torch.zeros(template.bytes, dtype=torch.uint8, device=device)
        self._views = template.views(self._whole)
        self._mine = self._whole[sender * template.piece_bytes : (sender + 1) * template.piece_bytes]
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(HOST_BUFFERS):
            self._free.put(torch.zeros(template.piece_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"))
        self._arrived: queue.SimpleQueue[Arrived | Ended | RuntimeError] = queue.SimpleQueue()
        self._group = transfer.group(1 + row, sender)
        threading.Thread(target=self._receive, name="weights from training ranks", daemon=True).start()

    def take(self) -> Arrived | Ended:
        """Wait for the next weights, or for the end of the transfers.

        Raises:
            RuntimeError: the sender is gone.
        """
        item = self._arrived.get()
        if isinstance(item, RuntimeError):
            raise item
        return item

    def assemble(self, arrived: Arrived) -> dict[str, Tensor]:
        """Return the weights by name on the device, valid until the next call; release the host buffer. Collective."""
        if self._row is None:
            self._whole.copy_(arrived.buffer)
        else:
            self._mine.copy_(arrived.buffer)
            dist.all_gather_into_tensor(self._whole, self._mine.clone(), group=self._row)
        self.discard(arrived)
        return self._views

    def discard(self, arrived: Arrived) -> None:
        """Release the host buffer of weights that are no longer needed."""
        self._free.put(arrived.buffer)

    def _receive(self) -> None:
        header = torch.zeros(3, dtype=torch.int64)
        try:
            while True:
                self._group.broadcast(header)
                command, number, samples = header.tolist()
                if command == END:
                    self._arrived.put(Ended(number))
                    return
                buffer = self._free.get()
                began = time.perf_counter()
                self._group.broadcast(buffer)
                self._arrived.put(Arrived(number, samples, time.perf_counter() - began, buffer))
        except RuntimeError as error:
            self._arrived.put(error)


def _row_group(row: int, transfer: Transfer) -> dist.ProcessGroup | None:
    """Return the group of ranks that gather one copy of the weights; None if each rank receives all of it."""
    if transfer.senders == 1:
        return None
    if transfer.senders == transfer.evaluation_ranks:
        return dist.group.WORLD
    first = row * transfer.senders
    return groups.make(range(first, first + transfer.senders))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
