"""Memory that gloo ranks on CPUs share, in place of symmetric memory on GPUs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import symmetric_memory
from common.distributed.symmetric_memory import PeerMemory


class SharedHandle:
    """One rank's view of mapped files, with PyTorch's methods that need no signals."""

    def __init__(self, buffers: list[Tensor], group: dist.ProcessGroup) -> None:
        self._buffers, self._group = buffers, group
        self.buffer_ptrs = [buffer.data_ptr() for buffer in buffers]

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        start = storage_offset * dtype.itemsize
        return self._buffers[rank][start : start + sizes.numel() * dtype.itemsize].view(dtype).view(sizes)

    def barrier(self, channel: int) -> None:
        dist.barrier(self._group)


@contextlib.contextmanager
def shared_peers(folder: Path) -> Iterator[None]:
    """Let :meth:`PeerMemory.allocate` map files in ``folder``, which all ranks use. All bits are 1 at first: NaN."""
    numbers = itertools.count()

    def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
        ranks, number = dist.get_process_group_ranks(group), next(numbers)
        files = [folder / f"memory_{number}_of_{rank}" for rank in ranks]
        buffers = [torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files]
        buffers[group.rank()].fill_(255)
        dist.barrier(group)
        return PeerMemory(buffers[group.rank()], SharedHandle(buffers, group), group.rank(), len(ranks))  # type: ignore[arg-type]

    with (
        mock.patch.object(PeerMemory, "allocate", allocate),
        mock.patch.object(symmetric_memory, "refusal", return_value=None),
    ):
        yield
