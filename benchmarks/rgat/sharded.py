"""Arrays in shards that devices read in place: partition, choice of a placement, memory, and loading from files.

Features and edges are loaded in the same way. Nodes of each type are partitioned into contiguous shards, each rank
reads its shard past the page cache, and the ranks of a node map the memory of their peers.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.aligned_buffers import AlignedBuffers
from common.data.direct_reader import AHEAD, PIECE_BYTES
from common.data.direct_rows import DirectRows
from common.distributed import symmetric_memory
from common.distributed.environment import meminfo
from common.distributed.layout import AXES, Layout
from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import ConfigError, DeviceError, UnsupportedImplementation
from common.ops.operation import AUTO

T = TypeVar("T")

LOCAL, PEERS, HOST, EXCHANGE = "local", "peers", "host", "exchange"
"""Placements.

- ``local``: all rows on every device;
- ``peers``: a shard on each GPU of a node, read in place by the others;
- ``host``: a shard of each rank in the memory of their node, read in place;
- ``exchange``: a shard on every device of any number of nodes, with rows sent on request."""

LEFT_FREE = 2e9
"""Bytes of each device, and of each host, that arrays leave free."""

GB = 1e9

PORTABLE, MAPPED = 1, 2
"""Flags of cudaHostRegister: pinned for every context of this process, and mapped into its GPUs' address space."""


@dataclass(frozen=True)
class NodePartition:
    """Shards of all types' nodes. Shard s has nodes s * C to (s + 1) * C of each type, with C = ceil(nodes / shards).

    In a shard, types follow one another. All shards have the same size, so the last shards of a type may be partly or
    completely unfilled.
    """

    nodes: tuple[int, ...]
    shards: int

    @functools.cached_property
    def rows_per_shard(self) -> tuple[int, ...]:
        """C of each type."""
        return tuple(max(1, -(-count // self.shards)) for count in self.nodes)

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Offset of each type in a shard."""
        return tuple(accumulate(self.rows_per_shard, initial=0))[:-1]

    @property
    def rows(self) -> int:
        """Rows of a shard, all types together."""
        return sum(self.rows_per_shard)

    def share(self, number: int, shard: int) -> tuple[int, int]:
        """Return the nodes of type ``number`` in ``shard``: first and last (exclusive)."""
        count, per_shard = self.nodes[number], self.rows_per_shard[number]
        return min(count, shard * per_shard), min(count, (shard + 1) * per_shard)


@dataclass(frozen=True)
class MemoryBytes:
    """Free or needed memory.

    Attributes:
        device: bytes per GPU, the minimum over all; 0 if the ranks compute on CPUs.
        host: bytes per node.
    """

    device: float
    host: float

    @classmethod
    def free(cls, layout: Layout) -> MemoryBytes:
        """Return the least free memory of any rank, less ``LEFT_FREE``. Collective."""
        found, device, group = [0, meminfo().get("MemAvailable", 1 << 62)], layout.device, layout.group(*AXES)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            found[0] = torch.cuda.mem_get_info(device)[0]
        if group is not None:
            found = [min(symmetric_memory.gathered(value, group, device)) for value in found]
        return cls(max(0.0, found[0] - LEFT_FREE), max(0.0, found[1] - LEFT_FREE))


@dataclass(frozen=True)
class Ranks:
    """Ranks that hold an array.

    Attributes:
        count: total number.
        per_node: number on each node.
        gpus: whether they compute on GPUs.
    """

    count: int
    per_node: int
    gpus: bool

    @property
    def on_node(self) -> int:
        """Number of ranks on the fullest node."""
        return min(self.count, self.per_node)

    def shards(self, placement: str) -> int:
        """Return the number of shards of an array with a placement."""
        return {LOCAL: 1, EXCHANGE: self.count}.get(placement, self.on_node)

    def refusal(self, placement: str, node_copies: bool) -> str | None:
        """Return why the ranks cannot use a placement, regardless of memory; None if they can.

        Args:
            node_copies: whether every node may have a copy of the array.
        """
        if placement == PEERS and not self.gpus:
            return "it needs GPUs"
        if placement in (PEERS, HOST) and self.count > self.per_node and not node_copies:
            return f"it serves the ranks of one node, and there are {self.count}, {self.per_node} on each"
        if {PEERS: self.on_node, EXCHANGE: self.count}.get(placement) == 1:
            return "it needs two ranks or more"
        return None

    def needs(self, placement: str, shard_bytes: Callable[[int], float]) -> MemoryBytes:
        """Return the memory that an array takes; see :func:`candidates`."""
        shard = float(shard_bytes(self.shards(placement)))
        if self.gpus and placement != HOST:
            return MemoryBytes(shard, 0.0)
        return MemoryBytes(0.0, self.on_node * shard)


def candidates(
    what: str,
    requested: str,
    order: Sequence[str],
    ranks: Ranks,
    free: MemoryBytes,
    shard_bytes: Callable[[int], float],
    node_copies: bool = False,
) -> tuple[str, ...]:
    """Return the usable placements, best first: the requested one, or for ``auto`` all that fit.

    Args:
        what: name of the array in messages, a plural.
        order: placements that ``auto`` tries.
        shard_bytes: bytes of a shard, as a function of the number of shards.
        node_copies: whether every node may have a copy of the array.

    Raises:
        ConfigError: none is usable; the message has needed and free memory, and placements that would fit.
    """

    def fits(name: str) -> bool:
        needs = ranks.needs(name, shard_bytes)
        refused = ranks.refusal(name, node_copies) is not None
        return not refused and needs.device <= free.device and needs.host <= free.host

    fitting = [name for name in order if fits(name)]
    usable = fitting if requested == AUTO else [requested] if fits(requested) else []
    if usable:
        return tuple(usable)
    advice = f"choose {' or '.join(map(repr, fitting))}" if fitting else "use more GPUs or a smaller graph"
    reason = ranks.refusal(requested, node_copies)
    if reason is not None:
        raise ConfigError(f"{what} cannot be placed as {requested!r}: {reason}; {advice}")
    names = [name for name in order if ranks.refusal(name, node_copies) is None] if requested == AUTO else [requested]
    needed = " or ".join(f"{_described(ranks.needs(name, shard_bytes))} ({name})" for name in names)
    unused = f"{free.host / GB:.1f} GB of each host are free"
    if ranks.gpus:
        unused = f"{free.device / GB:.1f} GB of each GPU and {unused}"
    raise ConfigError(f"{what} of {shard_bytes(1) / GB:.1f} GB do not fit: they need {needed}, and {unused}; {advice}")


def _described(needs: MemoryBytes) -> str:
    return f"{needs.device / GB:.1f} GB of each GPU" if needs.device else f"{needs.host / GB:.1f} GB of each host"


def first_supported(what: str, names: Sequence[str], build: Callable[[str], T]) -> T:
    """Return the result of ``build`` for the first placement whose memory the GPUs can map.

    Args:
        what: name of the array in messages, a plural.

    Raises:
        UnsupportedImplementation: ``build`` raises it for all names.
    """
    for name in names[:-1]:
        try:
            return build(name)
        except UnsupportedImplementation:
            continue
    try:
        return build(names[-1])
    except UnsupportedImplementation as error:
        raise UnsupportedImplementation(f"{what} cannot be placed as {names[-1]!r}: {error}") from error


class ShardedArray:
    """Bytes in one shard per rank of a node. Construction is collective; each rank fills ``own``, then calls ``share``.

    Host memory is anonymous and shared through file descriptors. No file becomes visible, a killed rank leaves none
    behind, and the container's limit for /dev/shm does not apply.

    Args:
        placement: ``peers``, ``host``, or, for a single shard of this rank alone, ``local``.
        size: bytes of each shard.
        group: ranks of the node; None for a single rank, and with ``local``.

    Attributes:
        own: uint8, [size]: this rank's shard.
        shards: all shards, in the order of the group. Only read those of other ranks.

    Raises:
        UnsupportedImplementation: the GPUs cannot map each other's memory; raised on all ranks.
        DeviceError: the ranks cannot map each other's host memory; raised on all ranks.
    """

    def __init__(self, placement: str, size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._host, self._peers = placement == HOST, None
        self._registered: list[Tensor] = []
        if placement == PEERS:
            assert group is not None  # one rank has no peers
            self._peers, reason = attempt(lambda: PeerMemory.allocate(size, group, device), group, device)
            if self._peers is None:
                raise UnsupportedImplementation(reason)
            self.shards = self._peers.tensors((size,), torch.uint8)
        elif placement == HOST:
            self.shards = self._host_shards(size)
        else:
            self.shards = (torch.empty(size, dtype=torch.uint8, device=device),)
        self.own = self.shards[0 if self._group is None else self._group.rank()]

    def share(self) -> None:
        """Wait until all ranks have filled their shards; on a GPU, pin those in host memory.

        Pages are pinned only now, because the rank that first writes a page places it next to its own processor.

        Raises:
            DeviceError: the memory cannot be pinned.
        """
        if self._group is not None:
            symmetric_memory.gathered(0, self._group, self._device)
        if not self._host or self._device.type != "cuda":
            return
        for shard in self.shards:
            address, size = shard.data_ptr(), shard.numel()
            try:
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE | MAPPED)))
            except RuntimeError as error:
                self.close()
                raise DeviceError(f"{size:,} bytes of host memory cannot be pinned: {error}") from error
            self._registered.append(shard)

    def close(self) -> None:
        """Unpin host memory and release that of peers; shards in memory live as long as their tensors."""
        while self._registered:
            address = self._registered.pop().data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
        if self._peers is not None:
            self._peers.close()

    def _host_shards(self, size: int) -> tuple[Tensor, ...]:
        descriptor = os.memfd_create("shard", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            return (_mapped(descriptor, size),) if self._group is None else self._mapped_by_all(descriptor, size)
        finally:
            os.close(descriptor)

    def _mapped_by_all(self, descriptor: int, size: int) -> tuple[Tensor, ...]:
        group = self._group
        assert group is not None
        identity = (os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        processes, descriptors, files = (symmetric_memory.gathered(number, group, self._device) for number in identity)
        found, reason = [], "another rank of the node cannot map the memory of its neighbours"
        try:
            for rank, (process, number, file) in enumerate(zip(processes, descriptors, files, strict=True)):
                found.append(_of_process(process, number, file, size) if rank != group.rank() else None)
        except OSError as error:
            reason = f"the memory of another rank of the node cannot be mapped: {error}; do they run in one container?"
        mapped = len(found) == len(processes)
        if not all(symmetric_memory.gathered(int(mapped), group, self._device)):
            raise DeviceError(reason)
        return tuple(_mapped(descriptor, size) if shard is None else shard for shard in found)


def _of_process(process: int, descriptor: int, file: int, size: int) -> Tensor:
    """Map another process's descriptor, after a check that it is the expected file."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_ino != file:
            raise OSError(f"process {process} is another one here")
        return _mapped(opened, size)
    finally:
        os.close(opened)


def _mapped(descriptor: int, size: int) -> Tensor:
    memory = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # the system may have no large pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)


class RowLoader:
    """Context manager that copies rows of files into tensors; its exit waits for all copies.

    Reads bypass the page cache, and overlap with copies to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers = AlignedBuffers(2 * AHEAD + 1, PIECE_BYTES, pin_memory=device.type == "cuda")

    def __enter__(self) -> RowLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.close()

    def copy(self, rows: DirectRows, first: int, last: int, into: Tensor) -> Iterator[tuple[int, int]]:
        """Copy rows ``first`` to ``last`` (exclusive), and yield begin and end of each piece that has arrived.

        On a GPU, a piece has arrived only for work that is queued afterwards.

        Args:
            into: output, [last - first, *row_shape], in the rows' dtype.

        Raises:
            DataError: the file has become shorter or cannot be read.
        """
        for piece in rows.read(first, last, PIECE_BYTES, buffers=self._buffers):
            begin = piece.first - first
            end = begin + len(piece.values)
            into[begin:end].copy_(piece.values, non_blocking=True)
            if into.is_cuda:
                event = torch.cuda.Event()
                event.record()
                piece.keep_until(event)
            yield begin, end
