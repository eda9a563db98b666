"""Times of a kernel with other tiles than its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from common.ops.bench.cases import Pass
from common.ops.bench.stopwatch import time_graph
from common.ops.bench.supervisor import failures

CALLS = 8
_BEST = 3
_NEWS_EVERY = 20
"""Tiles after which the command's supervisor hears that this goes on: each has to be compiled."""


class Sweep(NamedTuple):
    """Tiles to try for one kernel at one size.

    Attributes:
        table, key: where the kernel's tile stands.
        choices: fields of the tiles.
        build: the passes that run it, for a dtype.
        backward: whether the kernel is one of backward, whose time the second pass holds.
    """

    table: dict[str, Any]
    key: str
    choices: Sequence[tuple[int, ...]]
    build: Callable[[torch.dtype], list[Pass]]
    backward: bool


def sweep(name: str, tried: Sweep, dtype: torch.dtype) -> None:
    """Print the best tiles of one kernel by the time of forward, or of forward and backward, that it is part of."""
    table, key, choices, build, backward = tried
    pass_ = build(dtype)[int(backward)]
    before = table[key]
    times = []
    wanted = list(dict.fromkeys([tuple(before), *choices]))
    for done, choice in enumerate(wanted):
        if done and done % _NEWS_EVERY == 0:
            print(f"{name:38s} {done} of {len(wanted)} tiles tried", flush=True)
        table[key] = type(before)(*choice)
        try:
            times.append((_milliseconds(pass_.run), choice))
        except failures() as reason:  # such as more shared memory than there is
            print(f"    {choice} {str(reason).splitlines()[0]}", flush=True)
    table[key] = before
    now = {choice: ms for ms, choice in times}.get(tuple(before), float("nan"))
    best = ", ".join(f"{choice} {ms:.4f}" for ms, choice in sorted(times)[:_BEST])
    print(f"{name:38s} now {tuple(before)} {now:.4f} ms; best: {best}", flush=True)


def _milliseconds(run: Callable[[], Any]) -> float:
    def repeat() -> int:
        for _ in range(CALLS):
            run()
        return CALLS

    return time_graph(repeat)
