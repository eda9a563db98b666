"""Measure the read bandwidth of storage without the page cache, and check that all nodes see the same folders."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.data import manifest
from common.data.aligned_buffers import AlignedBuffers
from common.data.direct_reader import DirectFile, NoDirectReads
from common.distributed.shared_folder import marked, sees
from common.doctor.reading import Reading, first_line
from common.errors import DataError

BLOCK = 4 << 20
THREADS = 8
"""Number of concurrent reads, as in a prefetching reader."""
GB = 1e9


def read_storage(path: Path, size: int, seconds: float) -> Reading:
    """Return the read bandwidth of ``path`` in GB/s, with O_DIRECT, ``THREADS`` threads and blocks of 4 MiB.

    In a writable folder, a temporary file is written and read; otherwise the existing files are read. Caches inside the
    storage system are not bypassed.

    Args:
        size: maximum number of bytes to read.
        seconds: time limit for reading, and separately for writing before it.
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
    except NoDirectReads:
        return Reading(missing=f"the file system of {path} has no reads past the page cache (O_DIRECT)")
    except (DataError, OSError) as error:
        system = error if isinstance(error, OSError) else error.__cause__
        reason = system.strerror if isinstance(system, OSError) else None
        return Reading(failed=f"{path}: {reason or first_line(error)}")


@contextlib.contextmanager
def output_marked(output_dir: Path) -> Iterator[Path]:
    """Create a file in ``output_dir`` during the block, and yield its path. It is removed even if the block fails.

    If ``output_dir`` does not exist, its nearest existing parent folder is used.

    Raises:
        OSError: the file cannot be written.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(output_dir))
    folder = next(path for path in (output_dir, *output_dir.parents) if path.is_dir())
    with marked(folder) as marker:
        yield marker


def read_output(marker: Path) -> Reading:
    """Check that this node sees the file that rank 0 wrote into the output folder, and may write there."""
    if not sees(marker):
        return Reading(
            failed=f"a file that rank 0 wrote into {marker.parent} is not visible on this node: give all nodes one "
            "folder that they share, mounted at the same path"
        )
    writable = os.access(marker.parent, os.W_OK)
    return Reading(True) if writable else Reading(failed=f"{marker.parent} is not writable on this node")


def read_data(data_dir: Path) -> Reading:
    """Return the digest of the manifest in the folder of prepared data, or the number of entries without a manifest."""
    try:
        names = os.listdir(data_dir)
        if manifest.NAME in names:
            return Reading(f"manifest {manifest.digest(data_dir / manifest.NAME, 'sha256')[:12]}")
    except OSError as error:
        return Reading(failed=f"{error.filename or data_dir}: {error.strerror}")
    return Reading(f"{len(names)} entries, no manifest") if names else Reading(failed=f"{data_dir} is empty")


@contextlib.contextmanager
def _scratch_file(folder: Path, size: int, seconds: float) -> Iterator[Path]:
    """Write a temporary file for up to ``seconds`` and ``size`` bytes; yield a path that only this process can use.

    The file is gone after the block, even if it fails or the process is killed.
    """
    path = folder / f".mlperf-suite-doctor-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()  # before writing, so that a killed process leaves no file behind
        # Random bytes, because compressing storage would read zeros faster than real data.
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
    """Return readable files below the folder, until they have ``size`` bytes in total."""
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
    totals, errors = [0] * THREADS, list[DataError | OSError]()

    def work(index: int) -> None:
        try:
            with AlignedBuffers(1, BLOCK, pin_memory=False) as buffers, contextlib.ExitStack() as opened:
                file: DirectFile | None = None
                while time.perf_counter() < deadline:
                    with lock:
                        path, offset, length = next(blocks, (None, 0, 0))
                    if path is None:
                        return
                    if file is None or file.path != path:
                        opened.close()
                        file = opened.enter_context(DirectFile(path, mode="direct"))
                    totals[index] += len(file.read(offset, length, buffers[0]))
        except (DataError, OSError) as error:
            errors.append(error)

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


def _blocks(files: Sequence[Path], size: int) -> Iterator[tuple[Path, int, int]]:
    """Yield file, offset and length of each read, in whole blocks, until ``size`` bytes are reached."""
    left = size
    for file in files:
        end = file.stat().st_size
        for offset in range(0, end, BLOCK):
            if left <= 0:
                return
            left -= BLOCK
            yield file, offset, min(BLOCK, end - offset)
