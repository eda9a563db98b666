"""Worker process of the supervisor: times cases of operations, compiles them, or searches for better tiles."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from common.errors import UnsupportedImplementation
from common.ops.bench.stopwatch import time_graph
from common.ops.bench.supervisor import BUSY, RESULT, failures, work
from common.ops.cases import Case, Draw, Pass
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import Operation, compiled
from common.ops.tile import Tile

COMPILED = "compiled"
"""Name of the reference compiled by ``torch.compile``."""

LARGE_BYTES = 50e6
"""Passes that move fewer bytes are repeated more often, so that a CUDA graph runs long enough to be timed."""

SMALL = 4
"""Numbers of a tile up to this value are also changed by 1; larger ones are only halved and doubled."""


class Measured(NamedTuple):
    """Measurement of one pass.

    Attributes:
        operation, case, direction, implementation: names that identify the pass.
        ms: milliseconds per call.
        bytes, flops: bytes and floating-point operations per call.
    """

    operation: str
    case: str
    direction: str
    implementation: str
    ms: float
    bytes: float
    flops: float


def function_of(operation: Operation, name: str) -> Any:
    """Return an implementation or the compiled reference: a function or a named tuple of functions."""
    if name != COMPILED:
        return operation.function(name)
    torch._dynamo.reset()  # it compiles a function for at most eight sets of shapes
    return compiled(operation.reference)


def passes_of(operation: Operation, case: Case, name: str) -> list[Pass]:
    """Make the passes of an implementation at the case's sizes on this GPU.

    Raises:
        UnsupportedImplementation: the implementation does not support these sizes.
    """
    device, dtype = torch.device("cuda"), case.dtypes[-1]
    if name != COMPILED and (reason := operation.unsupported(name, case.request(device, dtype))):
        raise UnsupportedImplementation(reason)
    return case.passes(function_of(operation, name), Draw(device, dtype))


def compile_all(operation: Operation, case: Case, name: str) -> None:
    """Run each pass of a case once, so that its kernels are compiled."""
    for each in passes_of(operation, case, name):
        each.run()
        print(f"{BUSY}{each.name}", flush=True)
    torch.cuda.synchronize()


def measure(operation: Operation, case: Case, name: str) -> Iterator[Measured]:
    """Yield the time of each pass of a case, without the time of the pass that its ``after`` names."""
    times: dict[str, float] = {}
    for each in passes_of(operation, case, name):
        times[each.name] = _milliseconds(each) - (times[each.after] if each.after else 0.0)
        yield Measured(operation.name, case.name, each.name, name, times[each.name], each.bytes, each.flops)


def _milliseconds(pass_: Pass) -> float:
    """Return milliseconds per call, including the pass that ``after`` names."""
    calls = 20 if pass_.bytes < LARGE_BYTES else 4

    def repeat() -> int:
        for _ in range(calls):
            pass_.run()
        return calls

    return time_graph(repeat)


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Yield tiles that differ from ``tile`` in one number, which is halved, doubled or, if small, changed by 1."""
    for name, number in vars(tile).items():
        near = {number // 2, 2 * number, *({number - 1, number + 1} if number <= SMALL else ())}
        for other in sorted(near - {number, 0, -1}):
            yield tile.replace(**{name: other})


def climb(now: Tile, time_of: Callable[[Tile], float]) -> dict[Tile, float]:
    """Go from a tile to its fastest neighbour until no neighbour is faster.

    Args:
        time_of: function that returns milliseconds with a tile; infinity if the kernel cannot run with it.

    Returns:
        Milliseconds of every tile that was tried.
    """
    times = {now: time_of(now)}
    while True:
        for tile in neighbours(now):
            if tile not in times:
                times[tile] = time_of(tile)
        best = min(times, key=times.__getitem__)
        if best == now:
            return times
        now = best


def tables_of(operation: Operation, name: str) -> list[dict[str, Tile]]:
    """Return the tables of tiles (kernel to tile) in an implementation's module; none if its import fails."""
    try:
        module = importlib.import_module(str(operation.fast[name].source).partition(":")[0])
    except ImportError:
        return []
    tables = [value for value in vars(module).values() if isinstance(value, dict) and value]
    return [table for table in tables if all(isinstance(tile, Tile) for tile in table.values())]


def sweep(operation: Operation, case: Case, name: str) -> Iterator[str]:
    """Search for better tiles, one kernel after another, by the total time of a case's passes; yield lines of text."""
    passes = passes_of(operation, case, name)
    for tiles in tables_of(operation, name):
        for key, before in tiles.items():
            times = climb(before, functools.partial(_time_with, passes, tiles, key))
            best = min(times, key=times.__getitem__)
            now = f"{operation.name:24s} {case.name:28s} {key:16s} {before} {times[before]:.4f} ms"
            yield now + ("" if best == before else f"; better: {best} {times[best]:.4f} ms")


def _time_with(passes: Sequence[Pass], tiles: dict[str, Tile], key: str, tile: Tile) -> float:
    """Return milliseconds of all passes with another tile for one kernel; infinity if the kernel cannot run with it."""
    before = tiles[key]
    tiles[key] = tile
    print(f"{BUSY}{key} {tile}", flush=True)
    try:
        return sum(_milliseconds(each) for each in passes)
    except failures():  # for example, the tile needs more shared memory than the GPU has
        torch.cuda.synchronize()  # raises where the error has ruined the CUDA context, which ends this process
        return float("inf")
    finally:
        tiles[key] = before


def main(argv: Sequence[str] | None = None) -> None:
    """Run the tasks of the command line; each is a JSON list of an operation, a case and an implementation."""
    parser = argparse.ArgumentParser(prog="python -m common.ops.bench.worker", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--tiles", action="store_true", help="look for better tiles")
    mode.add_argument("--compile", action="store_true", help="run each pass once and time nothing")
    parser.add_argument("--worker", nargs="+", required=True, metavar="TASK")
    arguments = parser.parse_args(argv)
    torch.backends.cudnn.benchmark = True

    def run(task: str) -> None:
        package, case_name, name = json.loads(task)
        operation = all_operations()[package]
        case = next(case for case in cases_of(operation) if case.name == case_name)
        try:
            if arguments.compile:
                compile_all(operation, case, name)
                return
            for text in sweep(operation, case, name) if arguments.tiles else ():
                print(text, flush=True)
            for result in () if arguments.tiles else measure(operation, case, name):
                print(f"{RESULT}{json.dumps(result)}", flush=True)
        except UnsupportedImplementation as reason:  # not a failure, so that the process goes on
            print(f"{operation.name} {case.name} {name}: not measured: {reason}", flush=True)

    work(list(arguments.worker), run)


if __name__ == "__main__":
    main()
