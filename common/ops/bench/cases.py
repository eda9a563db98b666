"""What a benchmark of operations measures: entries, each an operation at one size, and their passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.ops.bench.stopwatch import time_graph
from common.ops.bench.table import Measured
from common.ops.operation import Operation, OperationRequest

T = TypeVar("T")

DEVICE = "cuda"

LARGE_BYTES = 50e6
"""Passes that move less are repeated more often, so that a graph lasts long enough to be timed."""

REPLAYS, CANDIDATE_REPLAYS = 9, 3
"""Of a graph. Candidates add up to nothing, and some take many times as long as what a step runs."""


ROTATED_BYTES = 400e6
"""Of inputs that are read in turn: more than an L2 cache holds."""


class Pass(NamedTuple):
    """One direction of an operation.

    Attributes:
        name: ``forward``, or another.
        run: enqueues it.
        bytes: what it must move.
        flops: where arithmetic counts.
        after: an earlier pass that ``run`` repeats first and whose time is subtracted.
    """

    name: str
    run: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    after: str | None = None


class Entry(NamedTuple):
    """An operation at the size of a layer, in one implementation.

    Attributes:
        name: operation, layer, implementation.
        calls: in a step; 0 for what a step does not run.
        build: its passes for a batch of samples in a dtype.
    """

    name: str
    calls: int
    build: Callable[[int, torch.dtype], list[Pass]]


def with_gradients(
    inputs: list[Tensor], gradients: Sequence[Tensor], function: Callable[[], Tensor | tuple[Tensor, ...]]
) -> Callable[[], Any]:
    """Forward and backward of a function with autograd."""
    return lambda: torch.autograd.grad(function(), inputs, gradients)


def both_ways(
    function: Callable[[], Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
    gradients: Sequence[Tensor],
    *,
    moved: tuple[float, float],
    flops: tuple[float, float] = (0.0, 0.0),
) -> list[Pass]:
    """Forward and backward of a function with one result, or as many as there are gradients.

    Args:
        function: enqueues forward.
        inputs: what gets a gradient.
        gradients: of the results.
        moved: bytes of forward and of backward: each input read once, each output written once.
        flops: of forward and of backward.
    """
    return [
        Pass("forward", function, moved[0], flops[0]),
        Pass("backward", with_gradients(inputs, gradients, function), moved[1], flops[1], after="forward"),
    ]


def rotating(make: Callable[[], T], input_bytes: float) -> Iterator[T]:
    """As many sets of inputs, in turn and without end, as exceed the L2 cache together.

    Args:
        make: one set.
        input_bytes: of a set.
    """
    return itertools.cycle([make() for _ in range(int(ROTATED_BYTES // input_bytes) + 1)])


def together(cases: Sequence[list[Pass]]) -> list[Pass]:
    """Several operations with the same passes, one after another, as one."""
    return [
        Pass(
            same[0].name,
            lambda same=same: [each.run() for each in same],  # type: ignore[misc]
            sum(each.bytes for each in same),
            sum(each.flops for each in same),
            same[0].after,
        )
        for same in zip(*cases, strict=True)
    ]


def requested(
    operation: Operation,
    implementation: str,
    sizes: Mapping[str, int],
    build: Callable[..., list[Pass]],
    batch: int,
    dtype: torch.dtype,
) -> list[Pass]:
    """The passes of an implementation at a size.

    Args:
        operation, implementation: what to measure.
        sizes: of the request, by name.
        build: makes the passes of (function, batch, dtype).
        batch: samples.
        dtype: of the activations.

    Raises:
        UnsupportedImplementation: it cannot serve the request.
    """
    reason = operation.unsupported(implementation, OperationRequest(torch.device(DEVICE), dtype, sizes))
    if reason is not None:
        raise UnsupportedImplementation(reason)
    return build(operation.function(implementation), batch, dtype)


def each(
    name: str,
    operation: Operation,
    chosen: str,
    sizes: Mapping[str, int],
    build: Callable[..., list[Pass]],
    calls: int = 1,
    only: Sequence[str] = (),
) -> list[Entry]:
    """An entry for every implementation, or for those in ``only``. A step calls the one that is ``chosen``."""
    return [
        Entry(
            f"{name} {implementation}",
            calls if implementation == chosen else 0,
            functools.partial(requested, operation, implementation, sizes, build),
        )
        for implementation in only or operation.names
    ]


def measure(entry: Entry, batch: int, dtype: torch.dtype, forward_only: bool) -> Iterator[Measured]:
    """Time the passes of one entry."""
    passes = entry.build(batch, dtype)
    times: dict[str, float] = {}
    for pass_ in passes[:1] if forward_only else passes:
        elapsed = _milliseconds(pass_, candidate=not entry.calls)
        times[pass_.name] = elapsed - (times[pass_.after] if pass_.after else 0.0)
        yield Measured(entry.name, batch, pass_.name, times[pass_.name], entry.calls, pass_.bytes, pass_.flops)


def _milliseconds(pass_: Pass, candidate: bool) -> float:
    """Of one call, that of ``after`` included."""
    calls = 20 if pass_.bytes < LARGE_BYTES else 1 if candidate else 4

    def repeat() -> int:
        for _ in range(calls):
            pass_.run()
        return calls

    return time_graph(repeat, replays=CANDIDATE_REPLAYS if candidate else REPLAYS)
