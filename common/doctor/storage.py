"""How fast storage can be read past the page cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.doctor.reading import Reading, first_line

BLOCK = 4 << 20
THREADS = 8
"""Reads in flight: the queue that a prefetching reader keeps."""
GB = 1e9


def read_storage(path: Path, size: int, seconds: float) -> Reading:
    """Read bandwidth of ``path`` in GB/s, with O_DIRECT, 4 MiB at a time from eight threads.

    In a folder that may be written, of a file that is written there and gone afterwards; otherwise of the files that
    are there. What storage has in a cache of its own is read as fast as that.

    Args:
        path: a file or a folder.
        size: bytes to read at most.
        seconds: longest time to read, and to write before it.
    """
    try:
        if path.is_dir() and os.access(path, os.W_OK):
            with _scratch_file(path, size, seconds) as scratch:
                return _read_files([scratch], size, seconds)
        files = [path] if path.is_file() else _files_below(path, size)
        if not files:
            missing = f"{path} has no file to read and may not be written" if path.is_dir() else f"no {path}"
            return Reading(failed=missing)
        return _read_files(files, size, seconds)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return Reading(missing=f"the file system of {path} has no reads past the page cache (O_DIRECT)")
        return Reading(failed=f"{path}: {error.strerror or first_line(error)}")


@contextlib.contextmanager
def _scratch_file(folder: Path, size: int, seconds: float) -> Iterator[Path]:
    """A new file of up to ``size`` bytes, as much as is written in ``seconds``, by a path of this process's.

    Its name in the folder is removed before anything is written, so that a killed process leaves nothing behind.
    """
    path = folder / f".mlperf-suite-doctor-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        # Random bytes, since storage that compresses reads zeros faster than it has them.
        block = secrets.token_bytes(BLOCK)
        deadline = time.perf_counter() + seconds
        for position in range(0, size, BLOCK):
            _write(descriptor, position.to_bytes(8, "little") + block[8:])
            if time.perf_counter() > deadline:
                break
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _files_below(folder: Path, size: int) -> list[Path]:
    """Files until they hold ``size`` bytes, in the order of the folder."""
    found: list[Path] = []
    total = 0
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            file = Path(parent) / name
            if file.is_file() and os.access(file, os.R_OK):
                found.append(file)
                total += file.stat().st_size
                if total >= size:
                    return found
    return found


def _read_files(files: Sequence[Path], size: int, seconds: float) -> Reading:
    blocks = _blocks(files, size)
    lock = threading.Lock()
    deadline = time.perf_counter() + seconds
    totals, errors = [0] * THREADS, list[OSError]()

    def work(index: int) -> None:
        buffer = mmap.mmap(-1, BLOCK)  # aligned to a page, as O_DIRECT demands
        opened: tuple[Path | None, int] = (None, -1)
        try:
            while time.perf_counter() < deadline:
                with lock:
                    file, offset = next(blocks, (None, 0))
                if file is None:
                    return
                if file != opened[0]:
                    _close(opened[1])
                    opened = (None, -1)
                    opened = (file, os.open(file, os.O_RDONLY | os.O_DIRECT))
                totals[index] += os.preadv(opened[1], [buffer], offset)
        except OSError as error:
            errors.append(error)
        finally:
            _close(opened[1])
            buffer.close()

    started = time.perf_counter()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    if errors:
        raise errors[0]
    total = sum(totals)
    return Reading(total / elapsed / GB) if total else Reading(failed=f"{files[0]} is empty")


def _blocks(files: Sequence[Path], size: int) -> Iterator[tuple[Path, int]]:
    """File and offset of each read, ``size`` bytes in all."""
    left = size
    for file in files:
        for offset in range(0, file.stat().st_size, BLOCK):
            if left <= 0:
                return
            left -= BLOCK
            yield file, offset


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
