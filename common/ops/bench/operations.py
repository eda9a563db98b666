"""``bench.only=ops`` and ``bench.only=tiles``: measure the cases of operations on one GPU.

First, several processes run everything once, which fills the caches of Triton and ``torch.compile`` on disk. Then one
worker process times the implementations of a case and the compiled reference. If it crashes, a new process continues
with the next task (:mod:`common.ops.bench.supervisor`).
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from common.errors import ConfigError
from common.ops.bench.stopwatch import copy_bandwidth, peak_flops
from common.ops.bench.supervisor import supervise
from common.ops.bench.worker import COMPILED, Measured, tables_of
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import REFERENCE, Operation, can_compile

EVERY = "all"
WORKER = "common.ops.bench.worker"
COMPILERS = 12
"""Largest number of processes that compile at once. Each holds the tensors of one case, up to about 10 GB."""


class Task(NamedTuple):
    """A case and an implementation to time.

    Attributes:
        package: ``package:NAME`` of the operation.
        implementation: ``reference``, ``compiled``, or the name of a faster implementation.
    """

    package: str
    case: str
    implementation: str


def operations_of(config_module: str, words: Sequence[str]) -> dict[str, Operation]:
    """Return operations that have cases, by ``package:NAME``.

    Args:
        config_module: module of a workload's configuration, which defines ``OPERATIONS``.
        words: parts of the names of operations or packages, or ``all`` for every operation of the suite; empty for the
            operations that the workload uses.

    Raises:
        ConfigError: a word is part of no name.
    """
    known = {package: operation for package, operation in all_operations().items() if cases_of(operation)}
    if not words:
        used = list(importlib.import_module(config_module).OPERATIONS.values())
        own = config_module.rpartition(".")[0] + ".ops."
        return {name: each for name, each in known.items() if name.startswith(own) or each in used}
    found = {}
    for word in words:
        matching = {
            package: each for package, each in known.items() if word == EVERY or word in package or word in each.name
        }
        if not matching:
            raise ConfigError(f"bench.operations: no operation with cases has {word!r} in its name")
        found.update(matching)
    return found


def tasks_of(operations: Mapping[str, Operation], *, tiles: bool) -> list[Task]:
    """Return all tasks; with ``tiles``, only those of implementations that have tables of tiles."""
    found = []
    for package, operation in operations.items():
        for case in cases_of(operation):
            for name in case.implementations(operation):
                if not tiles or tables_of(operation, name):
                    found.append(Task(package, case.name, name))
            if not tiles:
                names = (COMPILED, REFERENCE) if can_compile(operation.reference) else (REFERENCE,)
                found += [Task(package, case.name, name) for name in names]
    return found


def time_operations(
    operations: Mapping[str, Operation], *, tiles: bool, say: Callable[[str], object] = print
) -> list[Measured]:
    """Time operations, print a line for each pass of each implementation, and return the measurements.

    Args:
        operations: result of :func:`operations_of`.
        tiles: search for better tiles of Triton kernels instead.
        say: function that prints a line.

    Raises:
        ConfigError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench.only=ops and bench.only=tiles measure a GPU, and PyTorch sees none")
    name = torch.cuda.get_device_name()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    peak = peak_flops(name)
    say(
        f"{name}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, copy {bandwidth * 1e-9:.0f} GB/s"
    )
    tasks = tasks_of(operations, tiles=tiles)
    if not tiles:
        _fill_caches(tasks)
    found = []
    for result in supervise(WORKER, ["--tiles"] if tiles else [], [json.dumps(task) for task in tasks]):
        found.append(Measured(*json.loads(result)))
        say(line(found[-1], bandwidth, peak))
    for text in comparison(found):
        say(text)
    return found


def _fill_caches(tasks: Sequence[Task]) -> None:
    """Run each task that compiles something, in several processes. The timed runs report failures, not these."""
    texts = [json.dumps(task) for task in tasks if task.implementation != REFERENCE]
    processes = min(COMPILERS, os.cpu_count() or 1, len(texts)) or 1

    def run(shard: int) -> None:
        for _ in supervise(WORKER, ["--compile"], texts[shard::processes], say=lambda text: None):
            pass

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, range(processes)))


def line(measured: Measured, bandwidth: float, peak: float | None) -> str:
    """Return a line of the table.

    Args:
        measured: measurement of one pass.
        bandwidth: bandwidth of a copy in bytes per second.
        peak: peak FLOP/s of the GPU for 16-bit matrix products; None if unknown.
    """
    text = (
        f"{measured.operation:24s} {measured.case:28s} {measured.direction:16s} {measured.implementation:16s}"
        f" {measured.ms:9.4f} ms {measured.bytes * 1e-6:8.1f} MB"
    )
    if measured.ms <= 0:  # the difference of two times that differ only by noise
        return text
    seconds = measured.ms * 1e-3
    text += f" {measured.bytes / seconds / bandwidth:5.0%} of a copy"
    if measured.flops:
        rate = measured.flops / seconds
        text += f" {rate * 1e-12:6.0f} TFLOP/s" + (f" {rate / peak:4.0%} of peak" if peak else "")
    return text


def comparison(measured: Iterable[Measured]) -> Iterator[str]:
    """Yield a line for each case: total milliseconds of all passes by implementation, the fastest first.

    An implementation that failed after some of its passes is left out.
    """
    cases: dict[tuple[str, str], dict[str, list[float]]] = {}
    for each in measured:
        times = cases.setdefault((each.operation, each.case), {})
        times.setdefault(each.implementation, []).append(each.ms)
    for (operation, case), times in cases.items():
        passes = max(map(len, times.values()))
        totals = {name: sum(each) for name, each in times.items() if len(each) == passes}
        ordered = sorted(totals.items(), key=lambda pair: pair[1])
        yield f"{operation:24s} {case:28s} " + ", ".join(f"{name} {ms:.4f} ms" for name, ms in ordered)


def report(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the measurements, the device and the versions as values for a JSON file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"device": device, "versions": versions, "passes": [each._asdict() for each in measured]}
