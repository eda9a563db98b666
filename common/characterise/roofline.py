"""Roofline of a step: the shortest time that each kernel could take, from its bytes and FLOPs and the machine's rates.

A kernel needs at least ``max(bytes / bandwidth, FLOPs / rate)``, where the rate is that of sustained matrix products in
the format of its operands (S. Williams, A. Waterman, D. Patterson, "Roofline", 2009). The step's share of its roofline
is the sum over its kernels, divided by the step; each counts at most as its measured time. Communication has no such
limit and adds nothing to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.characterise.counters import Counters, base_name
from common.config.system import Hardware
from common.run.kernel_profile import COMMUNICATION, kind_of

TENSOR_CORES = frozenset({"fp16", "bf16", "tf32", "fp8"})
"""Formats of operands that tensor cores multiply."""


@dataclass(frozen=True)
class Position:
    """A kernel of a step and its place in the roofline.

    Attributes:
        kind: kind of work; on a CPU, the operator.
        ms: milliseconds in a step, all launches together.
        bytes, flops: work in a step; None if unknown.
        precision: format of the operands; empty if unknown.
        bound_ms: shortest time that the work could take; None if work or rates are unknown.
        limit: resource that gives ``bound_ms``, ``memory`` or ``compute``; empty if it is None.
        source: origin of the work: ``operator NAME``, ``case NAME``, ``counters``, or empty if it is unknown.
        products: whether the kernel multiplies matrices; None if unknown.
        counters: values that ``ncu`` counted for the kernel; None without ``ncu``.
    """

    kernel: str
    kind: str
    launches: int
    ms: float
    bytes: float | None = None
    flops: float | None = None
    precision: str = ""
    bound_ms: float | None = None
    limit: str = ""
    source: str = ""
    products: bool | None = None
    counters: Counters | None = None

    @property
    def share(self) -> float | None:
        """Shortest possible time as a fraction of the measured time; above 1 if data come from a cache."""
        return None if self.bound_ms is None or self.ms <= 0 else self.bound_ms / self.ms


@dataclass(frozen=True)
class Roofline:
    """All kernels of a step.

    Attributes:
        positions: the kernels, longest first.
        busy_ms: milliseconds in which any kernel ran.
    """

    step_ms: float
    busy_ms: float
    positions: Sequence[Position]

    @property
    def mix(self) -> dict[str, float]:
        """Kind of work to its fraction of the time of all kernels, largest first."""
        total = math.fsum(each.ms for each in self.positions)
        kinds: dict[str, float] = {}
        for each in self.positions:
            kinds[each.kind] = kinds.get(each.kind, 0.0) + each.ms / total
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))

    @property
    def bound_ms(self) -> float:
        """Shortest time of all kernels whose work is known."""
        return math.fsum(each.bound_ms for each in self.positions if each.bound_ms is not None)

    @property
    def share(self) -> float:
        """The step's share of its own roofline; a lower limit if work is unknown (:attr:`known`).

        The shortest time of a kernel counts at most as its measured time: data from a cache must not make up for
        kernels that are far from their roofline.
        """
        bounds = (min(each.bound_ms, each.ms) for each in self.positions if each.bound_ms is not None)
        return math.fsum(bounds) / self.step_ms

    @property
    def known(self) -> float:
        """Fraction of the time of all kernels, except communication, whose shortest time is known."""
        return self._fraction([each for each in self.positions if each.bound_ms is not None])

    @property
    def tensor_cores(self) -> float:
        """Fraction of the time of all kernels, except communication, in products of formats of tensor cores."""
        return self._fraction([each for each in self.positions if each.products and each.precision in TENSOR_CORES])

    @property
    def products_known(self) -> float:
        """Fraction of the time of all kernels, except communication, of which is known whether they are products."""
        return self._fraction([each for each in self.positions if each.products is not None])

    def _fraction(self, some: Iterable[Position]) -> float:
        every = math.fsum(each.ms for each in self.positions if each.kind != COMMUNICATION)
        return math.fsum(each.ms for each in some if each.kind != COMMUNICATION) / every if every else 0.0


def shortest(work_bytes: float, flops: float, precision: str, hardware: Hardware | None) -> tuple[float, str] | None:
    """Return the shortest milliseconds for some work, and what limits it; None if a rate is unknown."""
    if hardware is None:
        return None
    memory = work_bytes / hardware.memory_gbs * 1e-6
    if not flops:
        return memory, "memory"
    if precision not in hardware.tflops:
        return None
    compute = flops / hardware.tflops[precision] * 1e-9
    return (compute, "compute") if compute > memory else (memory, "memory")


def roofline(
    measured: Mapping[str, Any],
    eager: Mapping[str, Any] | None,
    hardware: Hardware | None,
    counters: Mapping[str, Counters] | None = None,
) -> Roofline:
    """Return the roofline of a measured step.

    Args:
        measured: report of ``bench`` with ``bench.kernels``; its times count.
        eager: the same of an eager step, whose work counts; None if it was not measured.
        hardware: rates of the machine; None if unknown.
        counters: counters of ``ncu`` by base name of the kernel.
    """
    source = (eager or measured)["kernels"]
    operators = _by_kernel(source.get("operators", []))
    cases = [case for case in source.get("cases", []) if not case["failure"]]
    breakdown = measured["kernels"]["breakdown"]
    if breakdown is None:  # a CPU: the operators are the kernels
        times = {name: (sum(row["ms"] for row in rows), sum(row["launches"] for row in rows))
                 for name, rows in operators.items()}  # fmt: skip
        busy = sum(ms for ms, _ in times.values())
    else:
        times = {name: (ms, launches) for name, (ms, launches) in breakdown["kernels"].items()}
        busy = breakdown["busy_ms"]
    found = []
    for name, (ms, launches) in times.items():
        kind = name if breakdown is None else kind_of(name)
        bare = Position(name, kind, launches, ms)
        placed = None
        if kind != COMMUNICATION:
            placed = _of_operators(bare, operators.get(name, ()), hardware) or _of_cases(bare, cases, hardware)
            counted = (counters or {}).get(base_name(name))
            placed = replace(placed or _of_counters(bare, counted, hardware) or bare, counters=counted)
        found.append(placed or bare)
    return Roofline(measured["step_ms"], busy, sorted(found, key=lambda each: -each.ms))


def _by_kernel(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["kernel"], []).append(row)
    return found


def _of_operators(bare: Position, rows: Sequence[Mapping[str, Any]], hardware: Hardware | None) -> Position | None:
    """Return the position of a kernel that operators of PyTorch launch.

    If the eager step launches it more or less often than the measured one, the work is scaled to the latter.
    """
    if not rows:
        return None
    factor = bare.launches / sum(row["launches"] for row in rows) if bare.launches else 1.0
    limits: dict[str, float] = {"memory": 0.0, "compute": 0.0}
    known = True
    for row in rows:
        if (least := shortest(row["bytes"], row["flops"], row["precision"], hardware)) is None:
            known = False
        else:
            limits[least[1]] += least[0] * factor
    longest = max(rows, key=lambda row: row["ms"])
    return Position(
        bare.kernel,
        bare.kind,
        bare.launches,
        bare.ms,
        bytes=sum(row["bytes"] for row in rows) * factor,
        flops=sum(row["flops"] for row in rows) * factor,
        precision=longest["precision"],
        bound_ms=sum(limits.values()) if known else None,
        limit=max(limits, key=lambda name: limits[name]) if known else "",
        source=f"operator {longest['operator']}",
        products=any(row["flops"] > 0 for row in rows),
    )


def _of_counters(bare: Position, counted: Counters | None, hardware: Hardware | None) -> Position | None:
    """Return the position of a kernel whose work only ``ncu`` knows, from its share of both rates.

    The bytes are those that were really moved, which can be more than those that must move.
    """
    if counted is None or hardware is None:
        return None
    memory = counted.bytes_per_second / hardware.memory_gbs * 1e-9
    return replace(
        bare,
        bytes=counted.bytes_per_second * bare.ms * 1e-3,
        bound_ms=bare.ms * max(memory, counted.tensor),
        limit="compute" if counted.tensor > memory else "memory",
        source="counters",
    )


def _of_cases(bare: Position, cases: Sequence[Mapping[str, Any]], hardware: Hardware | None) -> Position | None:
    """Return the position of a kernel of the suite's operations: its share of the roofline in the cases with it.

    The sizes of a case can differ from those in the step, so the share is carried over, not the bytes.
    """
    of_kernel = [case for case in cases if case["kernels"].get(bare.kernel, 0.0) > 0]
    if not of_kernel:
        return None
    bound, spent, known = 0.0, 0.0, True
    limit = ""
    for case in of_kernel:
        own, whole = case["kernels"][bare.kernel], sum(case["kernels"].values())
        if (least := shortest(case["bytes"], case["flops"], case["precision"], hardware)) is None:
            known = False
            continue
        bound, spent, limit = bound + least[0] * own / whole, spent + own, least[1]
    longest = max(of_kernel, key=lambda case: case["kernels"][bare.kernel])
    return Position(
        bare.kernel,
        bare.kind,
        bare.launches,
        bare.ms,
        precision=longest["precision"],
        bound_ms=bare.ms * bound / spent if known else None,
        limit=limit if known else "",
        source=f"case {longest['operation']}, {longest['case']}, {longest['direction']}",
        products=any(case["flops"] > 0 for case in of_kernel),
    )
