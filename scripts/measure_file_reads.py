"""Measure shuffled reads of whole files, one per sample, beside sequential reads of the same files.

    python scripts/measure_file_reads.py FOLDER --files 480 --threads 8 --repetitions 3

Each repetition reads all files three times: in blocks of 4 MiB in order, past the page cache (the reference); whole
files in random order past the page cache; and the same through the page cache. Files are those of CosmoFlow by
default, 16,777,287 random bytes, which the script writes and removes. To see a set larger than the memory, start it in
a control group with a limit; for version 1, as root:

    mkdir /sys/fs/cgroup/memory/limited && echo 2G > /sys/fs/cgroup/memory/limited/memory.limit_in_bytes
    sh -c 'echo $$ > /sys/fs/cgroup/memory/limited/cgroup.procs; exec python scripts/measure_file_reads.py FOLDER'
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 4 << 20


def write_files(folder: Path, count: int, size: int) -> list[Path]:
    """Write ``count`` files of ``size`` random bytes past the page cache; return their paths."""
    from common.data.aligned_buffers import AlignedBuffers
    from common.data.direct_writer import write_file

    paths = [folder / f"{number:06d}" for number in range(count)]
    noise = os.urandom(size)
    with AlignedBuffers(1, BLOCK, pin_memory=False) as buffers:
        for number, path in enumerate(paths):
            start = number * 4099 % size  # different content, so that storage cannot store it once
            write_file(path, [noise[start:], noise[:start]], buffers[0])
    return paths


def rate(items: Sequence[Item], size: int, threads: int, read: Callable[[Iterator[Item]], None]) -> float:
    """Return GB/s of ``threads`` threads that read ``size`` bytes. They take the items in turn."""
    lock, remaining = threading.Lock(), iter(items)

    def own() -> Iterator[Item]:
        while True:
            with lock:
                item = next(remaining, None)
            if item is None:
                return
            yield item

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(read, own()) for _ in range(threads)]:
            done.result()
    return size / (time.perf_counter() - started) / 1e9


def read_blocks(blocks: Iterator[tuple[Path, int]]) -> None:
    """Read blocks of 4 MiB, given by path and offset, past the page cache."""
    from common.data.aligned_buffers import AlignedBuffers
    from common.data.direct_reader import DirectFile

    with AlignedBuffers(1, BLOCK, pin_memory=False) as buffers:
        for path, offset in blocks:
            with DirectFile(path, mode="direct") as file:
                file.read(offset, min(BLOCK, file.size - offset), buffers[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, measure, print a table, and remove the files."""
    sys.path.insert(0, str(ROOT))
    from common.data.aligned_buffers import AlignedBuffers, aligned
    from common.data.direct_reader import Mode, read_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=480)
    parser.add_argument("--bytes", type=int, default=16_777_287)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args(arguments)

    def whole(mode: Mode) -> Callable[[Iterator[Path]], None]:
        def read(paths: Iterator[Path]) -> None:
            with AlignedBuffers(1, aligned(given.bytes), pin_memory=False) as buffers:
                for path in paths:
                    read_file(path, buffers[0], given.bytes, mode)

        return read

    folder = given.folder / "measured-file-reads"
    found: dict[str, list[float]] = {
        "sequential, 4 MiB": [],
        "whole files, O_DIRECT": [],
        "whole files, page cache": [],
    }
    try:
        paths = write_files(folder, given.files, given.bytes)
        blocks, total = list(itertools.product(paths, range(0, given.bytes, BLOCK))), given.files * given.bytes
        for repetition in range(given.repetitions):
            shuffled = random.Random(repetition).sample(paths, len(paths))
            rates = (
                rate(blocks, total, given.threads, read_blocks),
                rate(shuffled, total, given.threads, whole("direct")),
                rate(shuffled, total, given.threads, whole("buffered")),
            )
            for name, value in zip(found, rates, strict=True):
                found[name].append(value)
    finally:
        for path in folder.glob("*"):
            path.unlink()
        folder.rmdir()
    reference = statistics.median(found["sequential, 4 MiB"])
    print(f"{given.files} files of {given.bytes:,} bytes, {given.threads} threads, load {os.getloadavg()[0]:.1f}")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name}: {median:.3f} GB/s ({min(values):.3f} to {max(values):.3f}), {100 * median / reference:.0f} %")


if __name__ == "__main__":
    main()
