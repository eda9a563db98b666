"""Time reads of a large file: ``python -m common.data.direct_reader_bench --path FILE``.

Give a file larger than the caches of the storage. Each way reads the same bytes from the beginning on:

- ``direct``: with O_DIRECT;
- ``buffered``: through the page cache, from which the file was dropped before (only what is not being written can be);
- ``cached``: once more, from the page cache where the file fits into it.

With ``--device cuda`` every piece is copied to the GPU as well, asynchronously from pinned memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from common.data.aligned_buffers import AlignedBuffers
from common.data.direct_reader import AHEAD, PIECE_BYTES, THREADS, DirectFile, Mode, NoDirectReads
from common.errors import DataError, print_error

MB = 1 << 20
GB = 1e9
WAYS: tuple[tuple[str, Mode], ...] = (("direct", "direct"), ("buffered", "buffered"), ("cached", "buffered"))


def read_seconds(file: DirectFile, length: int, ahead: int, threads: int, buffers: AlignedBuffers, to: str) -> float:
    """Seconds in which the first ``length`` bytes of ``file`` are read, and copied to the device ``to``."""
    device = torch.device(to)
    on_device = torch.empty(buffers.size, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for piece in file.pieces([(0, length)], buffers.size, ahead, threads, buffers=buffers):
        if device.type == "cuda":
            on_device[: len(piece.values)].copy_(piece.values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
            piece.keep_until(copied)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def drop_from_cache(path: Path) -> None:
    """Let the page cache forget ``path``, but for what has to be written yet."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print GB/s of each way and round; an error's exit code if the file cannot be read."""
    parser = argparse.ArgumentParser(description="time reads of a file past the page cache and through it")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=8.0, help="most that is read each time, in 1e9 bytes (default: 8)")
    parser.add_argument("--piece-mb", type=int, default=PIECE_BYTES // MB, help="MiB of a piece (default: %(default)s)")
    parser.add_argument("--ahead", type=int, default=AHEAD, help="pieces on their way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=THREADS, help="that read (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    args = parser.parse_args(arguments)
    if min(args.piece_mb, args.threads, args.rounds) < 1 or args.ahead < 0 or args.gb <= 0:
        parser.error("sizes, threads and rounds are at least 1, and pieces ahead at least 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU")
    try:
        _time_ways(args)
    except DataError as error:
        print_error(error)
        return error.exit_code
    return 0


def _time_ways(args: argparse.Namespace) -> None:
    with DirectFile(args.path, mode="buffered") as file:
        length = min(file.size, int(args.gb * GB))
    if not length:
        raise DataError(f"{args.path} is empty; give a large file")
    print(
        f"{length / GB:.2f} GB of {args.path}, pieces of {args.piece_mb} MiB, {args.ahead} ahead, "
        f"{args.threads} threads, to {args.device}"
    )
    with AlignedBuffers(2 * args.ahead + 1, args.piece_mb * MB, pin_memory=args.device == "cuda") as buffers:
        for _ in range(args.rounds):
            for name, mode in WAYS:
                if name != "cached":
                    drop_from_cache(args.path)
                try:
                    with DirectFile(args.path, mode=mode) as file:
                        seconds = read_seconds(file, length, args.ahead, args.threads, buffers, args.device)
                except NoDirectReads as error:
                    print(f"{name:10} {error}")
                else:
                    print(f"{name:10} {length / seconds / GB:7.2f} GB/s  {seconds:8.3f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
