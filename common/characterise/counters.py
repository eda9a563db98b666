"""Hardware counters of kernels, read by NVIDIA Nsight Compute (``ncu``) if it is installed and permitted.

``ncu`` runs a ``bench`` whose eager step is between ``cudaProfilerStart`` and ``cudaProfilerStop``
(``bench.only=counters``), replays each kernel, and writes a table with a row for each launch.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
NAME = "Kernel Name"
LAUNCHES = 2000
"""Largest number of launches that are counted; each takes tens of milliseconds."""


@dataclass(frozen=True)
class Counters:
    """Counters of all launches of the kernels with one base name.

    Attributes:
        bytes_per_second: bytes of GPU memory that were read and written, divided by the time.
        tensor: fraction of the cycles in which the tensor cores were busy.
    """

    bytes_per_second: float
    tensor: float


def ncu_command(table: Path) -> list[str]:
    """Return the words before a command line that let ``ncu`` write counters to ``table``; empty without ``ncu``."""
    program = shutil.which("ncu")
    if program is None:
        return []
    options = ["--profile-from-start", "off", "--target-processes", "all", "--clock-control", "none"]
    form = ["--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "demangled"]
    metrics = ",".join((READ, WRITTEN, TIME, TENSOR))
    return [program, *options, *form, "--launch-count", str(LAUNCHES), "--metrics", metrics, "--log-file", str(table)]


def base_name(kernel: str) -> str:
    """Return the name of a kernel without return type, template arguments and parameters.

    ``ncu`` and PyTorch's profiler write template arguments in different ways.
    """
    plain = re.sub(r"\(anonymous namespace\)|<unnamed>", "unnamed", kernel.removeprefix("void "))
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip()


def parse_counters(text: str) -> dict[str, Counters]:
    """Return the counters in a table of ``ncu`` by base name of the kernel.

    Raises:
        ValueError: there are none; the message is the first error of ``ncu``, or says that there is no table.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        errors = (line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR=="))
        raise ValueError(next(errors, "ncu wrote no table"))
    sums: dict[str, list[float]] = {}
    # The row below the head has the units, which are base units: bytes, nanoseconds and percent.
    for row in list(csv.DictReader(lines[start:]))[1:]:
        if (values := _values(row)) is None:
            continue
        moved, nanoseconds, percent = values
        total = sums.setdefault(base_name(row[NAME]), [0.0, 0.0, 0.0])
        total[0] += moved
        total[1] += nanoseconds
        total[2] += percent / 100 * nanoseconds
    if not sums:
        raise ValueError("ncu counted no kernel")
    return {name: Counters(moved / time * 1e9, busy / time) for name, (moved, time, busy) in sums.items()}


def _values(row: Mapping[str, str]) -> tuple[float, float, float] | None:
    """Return bytes, nanoseconds and percent of a row; None if a counter of the launch is missing."""
    try:
        values = [float(row[name].replace(",", "")) for name in (READ, WRITTEN, TIME, TENSOR)]
    except (KeyError, ValueError, AttributeError):
        return None
    read, written, nanoseconds, percent = values
    return (read + written, nanoseconds, percent) if nanoseconds > 0 else None


def read_counters(table: Path) -> tuple[dict[str, Counters], str]:
    """Return the counters in a file of ``ncu``, or none and the reason."""
    try:
        return parse_counters(table.read_text(errors="replace")), ""
    except (OSError, ValueError) as error:
        return {}, f"ncu: {error.strerror if isinstance(error, OSError) else error}"
