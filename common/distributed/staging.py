"""Stage files on the local disk of a node: each file is read once, and all instances of a throughput run receive it.

The same rank of all instances forms a group, whose members stage the same files. In each round every member reads a
different file, the members gather the round's files over Gloo, and each writes all of them. A failure travels with the
next round: the member that failed raises its error, the others an error that names it.

Files are decoded by every instance while writing, not once by the reader, for two reasons: the network and the queue
carry the compressed bytes, a fifth of CosmoFlow's, and the processors of all instances are idle while the disks write.
So Gloo suffices, and the GPUs, whose memory the captured step owns, take no part.

Reading and writing release the GIL, as zlib does, so threads keep several files in progress on each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.aligned_buffers import ALIGNMENT, AlignedBuffer, AlignedBuffers, aligned
from common.data.direct_reader import read_file
from common.data.direct_writer import write_file
from common.data.staging import SourceFile, StagingPlan
from common.data.threads import ahead
from common.distributed.environment import integer
from common.distributed.groups import HostGroup
from common.errors import ConfigError, DataError, RankFailure

ADDRESS, INSTANCE, INSTANCES = "MLPERF_STAGING_ADDRESS", "MLPERF_STAGING_INSTANCE", "MLPERF_STAGING_INSTANCES"
OF_THE_LAUNCHER = f"the launcher sets {INSTANCE} and {INSTANCES}, or neither: set {{name}}, or unset both"

GATHERED_BYTES = 1 << 30
"""Largest number of bytes that one collective delivers to a rank."""
QUEUE_BYTES = 2 << 30
"""Largest number of bytes that wait on a rank to be written, before they are decoded."""
WRITTEN_BYTES = 8 << 20
"""Size of one write."""
READERS, WRITERS = 8, 16
"""Threads of a rank that read, and that decode and write."""


@dataclass(frozen=True)
class Instances:
    """The instances of a throughput run, which share the staging of their common data set.

    Attributes:
        address: ``HOST:PORT`` of a free port on the node of rank 0 of instance 0; or the absolute path of a file that
            does not exist and that all ranks can write, on a file system with locks. The same on all instances.
        instance: this instance, from 0.
        instances: number of instances, which have equal numbers of nodes and ranks.
    """

    address: str
    instance: int
    instances: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Instances | None:
        """Return the instances that the launcher has described; None for a run that stages alone.

        Raises:
            ConfigError: some variables are missing or wrong.
        """
        if INSTANCES not in environment and INSTANCE not in environment:
            return None
        count = integer(environment, INSTANCES, least=1, remedy=OF_THE_LAUNCHER)
        instance = integer(environment, INSTANCE, most=count - 1, remedy=OF_THE_LAUNCHER)
        if count == 1:
            return None
        address = environment.get(ADDRESS, "")
        host, _, port = address.rpartition(":")
        if not address.startswith("/") and not (host and port.isdecimal() and int(port) < 1 << 16):
            raise ConfigError(
                f"{ADDRESS}={address!r}: set it to HOST:PORT on a node of instance 0, or to a shared file"
            )
        return cls(address, instance, count)

    def group(self, rank: int, ranks: int, patience: timedelta, timeout: timedelta) -> HostGroup:
        """Connect ``rank`` of this instance, which has ``ranks`` ranks, with the same rank of all other instances.

        Args:
            patience: longest time to wait for the other instances, some of which may start later.
            timeout: longest time of every exchange after that.

        Raises:
            RankFailure: they did not connect within ``patience``, or the port of the address is in use.
        """
        hosts = self.instance == 0 and rank == 0
        try:
            if self.address.startswith("/"):
                store: dist.Store = dist.FileStore(self.address, self.instances * ranks)
            else:
                host, _, port = self.address.rpartition(":")
                store = dist.TCPStore(host, int(port), None, hosts, patience, wait_for_workers=False)
            store.set(f"arrived/{rank}/{self.instance}", "")
            store.wait([f"arrived/{rank}/{each}" for each in range(self.instances)], patience)
            store.set_timeout(timeout)
            return HostGroup(f"staging/{rank}", self.instance, self.instances, store, timeout)
        except RuntimeError as error:
            if hosts and "EADDRINUSE" in str(error):
                raise RankFailure(
                    f"staging: another program has the port of {ADDRESS}={self.address}; give another port"
                ) from error
            raise RankFailure(
                f"staging: instance {self.instance} did not meet the {self.instances - 1} others at {self.address} "
                f"within {patience.total_seconds():.0f} s: {_first_line(error)}. See whether one of them failed"
            ) from error


class Stager:
    """Copies this rank's files from the data folder to the staged folder. All members of a group call it equally.

    Args:
        source, target: data folder and staged folder.
        group: the same rank of all instances; None for a run that stages alone.
        queue_bytes: see :data:`QUEUE_BYTES`; a larger file waits alone.
        gathered_bytes: see :data:`GATHERED_BYTES`.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        group: HostGroup | None = None,
        queue_bytes: int = QUEUE_BYTES,
        gathered_bytes: int = GATHERED_BYTES,
    ) -> None:
        self._source, self._target, self._group = source, target, group
        self._members = 1 if group is None else group.size
        self._member = 0 if group is None else group.rank
        self._queue_bytes, self._gathered_bytes = queue_bytes, gathered_bytes

    def agree(self, plan: StagingPlan, seed: int, nodes: int, ranks: int) -> int:
        """Return the seed of instance 0, after a check that all instances stage the same files.

        Args:
            seed: seed of this instance's permutation, from 0 to 2**63 - 1.
            ranks: ranks of this instance.

        Raises:
            ConfigError: the instances differ in their files, nodes or ranks.
            RankFailure: another instance is gone.
        """
        if self._group is None:
            return seed
        mine = torch.tensor([seed, plan.digest(), nodes, ranks])
        everyone = self._gather(mine, [torch.empty_like(mine) for _ in range(self._members)])
        if any(bool((theirs[1:] != mine[1:]).any()) for theirs in everyone):
            raise ConfigError("staging: the instances have different files, nodes or ranks; give all the same settings")
        return int(everyone[0][0])

    def stage(self, files: Sequence[SourceFile], plan: StagingPlan | None = None) -> None:
        """Copy ``files``, the same ones on all members, and return when all members have written them.

        Args:
            plan: decodes the files; None copies them unchanged.

        Raises:
            DataError: a file is missing, damaged or of another size, or cannot be written.
            RankFailure: another instance failed, or gave no sign of life within the timeout of the group.
        """
        rounds = [files[start : start + self._members] for start in range(0, len(files), self._members)]
        queue = _WriteQueue(self._target, plan, self._queue_bytes)
        with ThreadPoolExecutor(READERS, "staging-read") as readers, queue:
            begun = (readers.submit(self._read, each) for each in rounds)
            for each, read in zip(rounds, ahead(begun, READERS, Future.cancel), strict=True):
                self._settle(queue.error or read.exception())
                buffer = read.result()
                for file, content in zip(each, self._exchange(each, buffer), strict=True):
                    queue.put(file, content, buffer.size)
            queue.drain()
            self._settle(queue.error)

    def _read(self, files: Sequence[SourceFile]) -> AlignedBuffer:
        """Return a buffer with this member's file of a round, if it has one, and with capacity for the longest."""
        capacity = aligned(max(ALIGNMENT, *(file.bytes for file in files)))
        buffer = AlignedBuffers(1, capacity, pin_memory=False)[0]
        if self._member < len(files):
            file = files[self._member]
            read_file(self._source / file.name, buffer, file.bytes)
        return buffer

    def _exchange(self, files: Sequence[SourceFile], buffer: AlignedBuffer) -> Iterator[memoryview]:
        """Gather a round's files in pieces; return their contents. ``buffer`` holds this member's file."""
        if self._group is None:
            yield buffer.blocks[: files[0].bytes]
            return
        longest = max(file.bytes for file in files)
        piece = max(1, self._gathered_bytes // self._members)
        received = [AlignedBuffers(1, buffer.size, pin_memory=False)[0] for _ in range(self._members)]
        for start in range(0, longest, piece):
            stop = min(longest, start + piece)
            self._gather(buffer.values[start:stop], [each.values[start:stop] for each in received])
        for file, each in zip(files, received, strict=False):
            yield each.blocks[: file.bytes]

    def _settle(self, error: BaseException | None) -> None:
        """Raise ``error``, or an error that names the other members that have one. Collective over the group."""
        if self._group is not None:
            flag = torch.tensor([error is not None])
            flags = self._gather(flag, [torch.empty_like(flag) for _ in range(self._members)])
            failed = [str(member) for member, theirs in enumerate(flags) if theirs and member != self._member]
            if failed and error is None:
                raise RankFailure(f"staging: instance {', '.join(failed)} failed and says why; no instance can go on")
        if error is not None:
            raise error

    def _gather(self, tensor: Tensor, into: list[Tensor]) -> list[Tensor]:
        assert self._group is not None
        try:
            self._group.gather(tensor, into)
        except RuntimeError as error:
            raise RankFailure(
                f"staging: instance {self._member} lost the connection to another instance ({_first_line(error)}); see "
                "which one ended or stopped"
            ) from error
        return into


class _WriteQueue:
    """Threads that decode and write files; a context manager that ends them.

    Attributes:
        error: the first error of a thread. Files that follow are not written.
    """

    def __init__(self, target: Path, plan: StagingPlan | None, limit: int) -> None:
        self._target, self._limit = target, limit
        self._decode = None if plan is None else plan.decode
        self._changed = threading.Condition()
        self._bytes = 0
        self._files = 0
        self._pool = ThreadPoolExecutor(WRITERS, "staging-write")
        self._own = threading.local()
        self.error: BaseException | None = None

    def __enter__(self) -> _WriteQueue:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def put(self, file: SourceFile, content: memoryview, held: int) -> None:
        """Queue a file. Wait while it would exceed the limit, unless it is the only one or a thread has failed.

        Args:
            held: size of the buffer that ``content`` is a part of, in bytes.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or not self._files or self._bytes + held <= self._limit
            )
            self._bytes += held
            self._files += 1
        self._pool.submit(self._write, file, content).add_done_callback(partial(self._written, held))

    def drain(self) -> None:
        """Wait until all files are written or a thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or not self._files)

    def _write(self, file: SourceFile, content: memoryview) -> None:
        if self.error is not None:
            return
        try:
            pieces = [content] if self._decode is None else self._decode(content)
            write_file(self._target / file.name, pieces, self._buffer())
        except OSError as error:
            raise DataError(
                f"{self._target / file.name} cannot be staged: {error.strerror}; free space on this disk, or give "
                "another staging_dir"
            ) from error
        except DataError as error:
            raise DataError(f"{file.name}: {error}; fetch or prepare it again") from error

    def _written(self, held: int, future: Future[None]) -> None:
        with self._changed:
            self._bytes -= held
            self._files -= 1
            if not future.cancelled():
                self.error = self.error or future.exception()
            self._changed.notify_all()

    def _buffer(self) -> AlignedBuffer:
        """Return the buffer of this thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = AlignedBuffers(1, WRITTEN_BYTES, pin_memory=False)[0]
        buffer: AlignedBuffer = self._own.buffer
        return buffer


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
