"""Values on their way to another process: copied once, into memory that both processes then see.

Arrays go there as they are, outside the pickle. That takes as long as a copy does; through a pipe several copies would
be made, and whoever predicts held up until the other process has read all of it.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

ALIGNMENT = 64
"""Bytes at a multiple of which every part begins."""


def pack(content: object) -> tuple[int, list[int]]:
    """Copy ``content``, which pickles, into memory without a name, which is freed when nobody has it any more.

    Returns:
        its file descriptor, to be closed, and the bytes of each part in it.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    descriptor = os.memfd_create("handed over")
    for part, start in zip(parts, _starts([len(part) for part in parts]), strict=False):
        written = 0
        while written < len(part):  # one call writes 2 GiB at most
            written += os.pwrite(descriptor, part[written:], start + written)
    return descriptor, [len(part) for part in parts]


def unpack(descriptor: int, sizes: Sequence[int]) -> Any:
    """What :func:`pack` put there, whose arrays stay where they are and may be written to."""
    starts = _starts(sizes)
    os.ftruncate(descriptor, starts[-1])
    memory = memoryview(mmap.mmap(descriptor, starts[-1], mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    head, *buffers = (memory[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(head, buffers=buffers)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return starts
