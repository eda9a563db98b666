"""Write files past the page cache (O_DIRECT), so that their content is on the disk and takes no memory.

Direct writes start and end at multiples of :data:`common.data.aligned_buffers.ALIGNMENT`. The last block of a file is
padded, and the file is cut to its size afterwards. If the file system does not support direct writes, the page cache
is used, flushed and emptied, and a message says so.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from common.data.aligned_buffers import AlignedBuffer, aligned
from common.data.direct_reader import REFUSALS

_reported: set[int] = set()
"""Device numbers of file systems for which this process has printed that they lack direct writes."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview], buffer: AlignedBuffer) -> int:
    """Write ``pieces`` one after another to a new file, and return its size in bytes. Creates the folder.

    Writing releases the GIL. Copying into ``buffer`` holds it, for about 0.1 ms per MiB.

    Args:
        buffer: collects the pieces; one write has its size.

    Raises:
        OSError: the file exists or cannot be written, e.g. because the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    output = _Output(path)
    try:
        size = filled = 0
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                taken = min(len(rest), buffer.size - filled)
                buffer.blocks[filled : filled + taken] = rest[:taken]
                filled, rest = filled + taken, rest[taken:]
                if filled == buffer.size:
                    output.write(buffer.blocks, size)
                    size, filled = size + filled, 0
        if filled:
            buffer.blocks[filled : aligned(filled)] = bytes(aligned(filled) - filled)
            output.write(buffer.blocks[: aligned(filled)], size)
            size += filled
        output.finish(size)
    finally:
        output.close()
    return size


class _Output:
    """A new file, opened for direct writes if its file system has them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._direct = True
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            path.unlink(missing_ok=True)  # Linux creates the file before it refuses the flag
            self._descriptor = os.open(path, flags, 0o644)
            self._use_page_cache()

    def write(self, blocks: memoryview, offset: int) -> None:
        while len(blocks):
            try:
                written = os.pwrite(self._descriptor, blocks, offset)
            except OSError as error:
                if not (self._direct and offset == 0 and error.errno in REFUSALS):
                    raise OSError(error.errno, error.strerror, str(self._path)) from error
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._use_page_cache()
                continue
            blocks, offset = blocks[written:], offset + written

    def finish(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        if not self._direct:
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)

    def _use_page_cache(self) -> None:
        self._direct = False
        device = os.fstat(self._descriptor).st_dev
        if device not in _reported:
            _reported.add(device)
            text = "the file system has no writes past the page cache (O_DIRECT)"
            print(f"{self._path} is written through the page cache: {text}", file=sys.stderr, flush=True)
