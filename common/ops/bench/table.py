"""What a benchmark of operations prints: a line for every pass, and what those of a step add up to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple


class Measured(NamedTuple):
    """One pass that was timed.

    Attributes:
        name: of its entry; the first word is its kind.
        batch: samples.
        direction: name of the pass.
        ms: milliseconds of one call.
        calls: in a step; 0 for a candidate.
        bytes, flops: of one call.
    """

    name: str
    batch: int
    direction: str
    ms: float
    calls: int
    bytes: float
    flops: float


def line(measured: Measured, bandwidth: float) -> str:
    """One line of the table; ``bandwidth`` is that of a copy, bytes per second."""
    rate = measured.bytes / max(measured.ms, 1e-6) * 1e3
    times = f"x {measured.calls}" if measured.calls else ""
    text = (
        f"{measured.name:36s} n {measured.batch:<2d} {measured.direction:16s} {measured.ms:9.4f} ms {times:4s}"
        f" {measured.bytes * 1e-6:8.1f} MB {rate * 1e-9:6.0f} GB/s {100 * rate / bandwidth:4.0f} %"
    )
    if measured.flops:
        text += f" {measured.flops / max(measured.ms, 1e-6) * 1e-9:6.0f} TFLOP/s"
    return text


def totals(measured: Iterable[Measured], names: Collection[str]) -> Iterator[str]:
    """For every batch, what the calls of a step add up to.

    Args:
        measured: everything that was timed.
        names: of all entries that a step runs; where some were not timed, the line says how many.
    """
    counted = [each for each in measured if each.calls]
    for batch in sorted({each.batch for each in counted}, reverse=True):
        own = [each for each in counted if each.batch == batch]
        forward = [each for each in own if each.direction == "forward"]
        missing = len(set(names) - {each.name for each in own})
        yield f"batch {batch}" + (f", without {missing} of {len(names)} cases" if missing else "")
        if forward:
            yield _sum("forward", forward, batch)
        if len(own) > len(forward):
            yield _sum("step", own, batch)


def _sum(name: str, measured: list[Measured], batch: int) -> str:
    kinds: dict[str, float] = {}
    for each in measured:
        kind = each.name.split()[0]
        kinds[kind] = kinds.get(kind, 0.0) + each.ms * each.calls
    total = sum(kinds.values())
    parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items())
    return f"  {name:8s} {total:8.2f} ms ({parts}), {batch / max(total, 1e-6) * 1e3:.1f} samples/s"
