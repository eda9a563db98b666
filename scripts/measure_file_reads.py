"""Measure shuffled reads of whole files, one per sample, beside sequential reads of the same files.

    python scripts/measure_file_reads.py FOLDER --files 480 --threads 8 --repetitions 6

Each repetition reads all files in three ways: blocks of 4 MiB in order, past the page cache (the reference); whole
files in random order past the page cache; and the same through the page cache. Each way comes first, second and third
equally often. The files are 16,777,287 random bytes each, as CosmoFlow's. The script writes and removes them.

For a set larger than the memory, start the script in a control group with a limit. With version 1, as root:

    mkdir /sys/fs/cgroup/memory/limited && echo 2G > /sys/fs/cgroup/memory/limited/memory.limit_in_bytes
    sh -c 'echo $$ > /sys/fs/cgroup/memory/limited/cgroup.procs; exec python scripts/measure_file_reads.py FOLDER'
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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


class Used(NamedTuple):
    """Elapsed seconds, processor seconds, and bytes that came from the disk and not from the page cache."""

    seconds: float
    processor: float
    fetched: int


def fetched() -> int:
    """Return the bytes that this process has read from disks so far."""
    return int(re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def measured(items: Sequence[Item], threads: int, read: Callable[[Iterator[Item]], None]) -> Used:
    """Measure ``threads`` threads that read the items, which they take in turn."""
    lock, remaining = threading.Lock(), iter(items)

    def own() -> Iterator[Item]:
        while True:
            with lock:
                item = next(remaining, None)
            if item is None:
                return
            yield item

    started, processor, before = time.perf_counter(), time.process_time(), fetched()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(read, own()) for _ in range(threads)]:
            done.result()
    return Used(time.perf_counter() - started, time.process_time() - processor, fetched() - before)


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
    parser.add_argument("--repetitions", type=int, default=6)
    given = parser.parse_args(arguments)

    def whole(mode: Mode) -> Callable[[Iterator[Path]], None]:
        def read(paths: Iterator[Path]) -> None:
            with AlignedBuffers(1, aligned(given.bytes), pin_memory=False) as buffers:
                for path in paths:
                    read_file(path, buffers[0], given.bytes, mode)

        return read

    folder = given.folder / "measured-file-reads"
    found: dict[str, list[Used]] = {"blocks": [], "direct": [], "buffered": []}
    folder.mkdir()
    try:
        paths = write_files(folder, given.files, given.bytes)
        blocks = list(itertools.product(paths, range(0, given.bytes, BLOCK)))
        for repetition in range(given.repetitions):
            shuffled = random.Random(repetition).sample(paths, len(paths))
            ways: dict[str, tuple[Sequence[Any], Callable[[Iterator[Any]], None]]] = {
                "blocks": (blocks, read_blocks),
                "direct": (shuffled, whole("direct")),
                "buffered": (shuffled, whole("buffered")),
            }
            names = list(ways)
            for name in names[repetition % 3 :] + names[: repetition % 3]:
                found[name].append(measured(ways[name][0], given.threads, ways[name][1]))
    finally:
        for path in folder.glob("*"):
            path.unlink()
        folder.rmdir()
    gigabytes = given.files * given.bytes / 1e9
    print(f"{gigabytes:.2f} GB in {given.files} files, {given.threads} threads, load {os.getloadavg()[0]:.1f}")
    print("way, GB/s (least to most), % of blocks in the same repetition, processor ms per GB, % from the disk")
    for name, results in found.items():
        rates = [gigabytes / each.seconds for each in results]
        parts = [100 * blocks.seconds / own.seconds for own, blocks in zip(results, found["blocks"], strict=True)]
        processor = statistics.median(1e3 * each.processor / gigabytes for each in results)
        disk = statistics.median(each.fetched / gigabytes / 1e7 for each in results)
        print(f"{name:9} {spread(rates, 3)} {spread(parts, 0)} {processor:.0f} {disk:.0f}")


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, the least and the most as text."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
