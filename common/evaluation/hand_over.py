"""Transfer of Python objects to another process through shared memory, with a single copy.

Arrays are stored outside the pickle, so the receiver uses them without copying. A pipe would need several copies, and
would block the sender until the other process has read everything.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

ALIGNMENT = 64
"""Alignment of each part in bytes."""


def pack(content: object) -> tuple[int, list[int]]:
    """Copy the picklable ``content`` into anonymous shared memory, which is freed with its last descriptor and mapping.

    Returns:
        file descriptor of the memory, which the caller must close, and the size of each part in bytes.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    descriptor = os.memfd_create("handed over")
    try:
        for part, start in zip(parts, _starts([len(part) for part in parts]), strict=False):
            written = 0
            while written < len(part):  # one call writes 2 GiB at most
                written += os.pwrite(descriptor, part[written:], start + written)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, [len(part) for part in parts]


def unpack(descriptor: int, sizes: Sequence[int]) -> Any:
    """Return the object that :func:`pack` stored. Its arrays are writable, private views of the memory."""
    starts = _starts(sizes)
    os.ftruncate(descriptor, starts[-1])
    memory = memoryview(mmap.mmap(descriptor, starts[-1], mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    head, *buffers = (memory[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(head, buffers=buffers)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each part, and the end of the last one."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return starts
