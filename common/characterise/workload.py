"""Figures of one workload: its measurements by variant and number of GPUs, and the gains between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from common.characterise.counters import Counters
from common.characterise.roofline import Roofline, roofline
from common.characterise.variants import (
    COMPILED,
    COUNTERS,
    EAGER,
    FP8,
    HOST_LINKS,
    ON_A_CPU,
    RECIPE,
    SIXTEEN_BITS,
    Plan,
)
from common.config.system import Hardware
from common.measure.table import MeasuredCopy
from common.ops.operation import REFERENCE

FAILED = "failed, see the error below"
NOT_VALID = "the last gradients were not finite, so that nothing was updated"


@dataclass(frozen=True)
class Known:
    """A figure, or the reason why there is none.

    Attributes:
        value: None without a figure.
        why: reason for a missing figure: :data:`FAILED`, or ``not measured: …``.
    """

    value: float | None
    why: str = ""


@dataclass(frozen=True)
class Characterised:
    """All measurements of one workload.

    Attributes:
        outcomes: results of the jobs in ``plan``.
        hardware: rates of the machine; None if unknown.
        counters: counters of ``ncu`` by base name of the kernel.
    """

    benchmark: str
    plan: Plan
    outcomes: Sequence[MeasuredCopy]
    hardware: Hardware | None
    cpu: bool
    counters: Mapping[str, Counters] = field(default_factory=dict)

    def figures(self, variant: str = RECIPE, gpus: int = 1) -> Mapping[str, Any] | None:
        """Return the report of a measurement, of several copies the one with the median step; None if there is none."""
        copies = [each.figures for each in self._of(variant, gpus) if each.figures is not None]
        return sorted(copies, key=lambda figures: figures["step_ms"])[(len(copies) - 1) // 2] if copies else None

    def rate(self, variant: str = RECIPE, gpus: int = 1) -> Known:
        """Return the samples per second of a measurement."""
        found = self._of(variant, gpus)
        figures = self.figures(variant, gpus)
        if figures is not None and figures["updated"]:
            return Known(figures["samples_per_second"])
        if found:
            return Known(None, FAILED)
        return Known(None, f"not measured: {self._reason(variant, gpus)}")

    def _of(self, variant: str, gpus: int) -> list[MeasuredCopy]:
        return [each for each in self.outcomes if (each.job.variant, each.job.gpus) == (variant, gpus)]

    def _reason(self, variant: str, gpus: int) -> str:
        groups = {EAGER: "graphs", REFERENCE: "implementations", COMPILED: "implementations", HOST_LINKS: "gpus"}
        group = groups.get(variant, "gpus" if gpus > 1 else "precision")
        missing = ON_A_CPU if self.cpu else "the workload has no such variant"
        return self.plan.absent.get(group, missing)

    @property
    def counts(self) -> list[int]:
        """Numbers of GPUs for which the recipe was to be measured."""
        return sorted({each.job.gpus for each in self.outcomes if each.job.variant == RECIPE})

    def sixteen_bits(self) -> str:
        """Return the name of the 16-bit format that was measured or planned."""
        names = {self.plan.precision, *(job.variant for job in self.plan.jobs)}
        return next((name for name in SIXTEEN_BITS if name in names), SIXTEEN_BITS[0])

    def in_format(self, precision: str) -> Known:
        """Return the samples per second with matrix products in a format."""
        return self.rate(RECIPE if precision == self.plan.precision else precision)

    def gains(self) -> dict[str, Known]:
        """Return ratios of samples per second by name; above 1 is a gain."""
        sixteen = self.sixteen_bits()
        pairs = {
            f"{sixteen} over fp32": (self.in_format(sixteen), self.in_format("fp32")),
            f"{sixteen} over TF32": (self.in_format(sixteen), self.in_format("tf32")),
            f"FP8 over {sixteen}": (self.in_format(FP8), self.in_format(sixteen)),
            "FP8 over TF32": (self.in_format(FP8), self.in_format("tf32")),
            "FP8 over fp32": (self.in_format(FP8), self.in_format("fp32")),
            "CUDA graphs over eager": (self._graphs(), self.rate(EAGER)),
            "our kernels over PyTorch's": (self.rate(), self.rate(REFERENCE)),
            "our kernels over PyTorch's compiled": (self.rate(), self.rate(COMPILED)),
            "PyTorch's compiled over not compiled": (self.rate(COMPILED), self.rate(REFERENCE)),
        }
        return {name: _ratio(*pair) for name, pair in pairs.items()}

    def _graphs(self) -> Known:
        absent = self.plan.absent.get("graphs")
        return self.rate() if absent is None else Known(None, f"not measured: {absent}")

    def efficiency(self, gpus: int, variant: str = RECIPE) -> Known:
        """Return the rate per GPU of several GPUs, divided by the rate of the slowest one alone."""
        together = self.rate(variant, gpus)
        alone = [
            each.figures["samples_per_second"]
            for each in self._of(RECIPE, 1)
            if each.figures and each.figures["updated"]
        ]
        if together.value is None or not alone:
            return Known(None, together.why or self.rate().why)
        return Known(together.value / gpus / min(alone))

    def slowdown_without_links(self) -> Known:
        """Return how many times longer a step of the most GPUs is if data go through host memory."""
        most = max(self.counts, default=1)
        return _ratio(self.rate(RECIPE, most), self.rate(HOST_LINKS, most))

    def host_cores(self, gpus: int) -> Known:
        """Return the processors that all ranks together keep busy while they queue steps."""
        return self._summed("host_cores", gpus)

    def sent_bytes(self, gpus: int) -> Known:
        """Return the bytes that all GPUs together send over NVLink in a step."""
        return self._summed("sent_bytes", gpus)

    def power(self, gpus: int = 1) -> Known:
        """Return the watts of all GPUs together."""
        return self._summed("power_w", gpus)

    def _summed(self, name: str, gpus: int) -> Known:
        figures = self.figures(RECIPE, gpus)
        if figures is None:
            return self.rate(RECIPE, gpus)
        values = [rank[name] for rank in figures["by_rank"]]
        if any(value is None for value in values):
            return Known(None, "not measured: this machine does not report it")
        return Known(math.fsum(values))

    def exposed(self, gpus: int) -> Known:
        """Return the fraction of a step of several GPUs in which only communication runs; mean over ranks."""
        figures = self.figures(RECIPE, gpus)
        if figures is None:
            return self.rate(RECIPE, gpus)
        values = [rank["exposed_ms"] for rank in figures["by_rank"]]
        if any(value is None for value in values):
            return Known(None, "not measured: no GPU kernels")
        return Known(statistics.fmean(values) / figures["step_ms"])

    def roofline(self) -> Roofline | None:
        """Return the roofline of the recipe's step on one GPU; None if it was not measured."""
        measured = self.figures()
        return None if measured is None else roofline(measured, self.figures(EAGER), self.hardware, self.counters)

    def failures(self) -> dict[str, str]:
        """Return the error of each failed measurement by name. Counters that ``ncu`` may not read are no failure."""
        outcomes = [each for each in self.outcomes if each.job.variant != COUNTERS]
        failed = {each.name: each.failure for each in outcomes if each.figures is None}
        for each in outcomes:
            if each.figures is not None and not each.figures["updated"]:
                failed[each.name] = NOT_VALID
            cases = ((each.figures or {}).get("kernels") or {}).get("cases", [])
            failed |= {
                f"{each.name}: case {case['operation']}, {case['case']}": case["failure"]
                for case in cases
                if case["failure"]
            }
        return failed

    def to_json(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        found = self.roofline()
        by_gpus = {
            str(gpus): {
                name: asdict(figure)
                for name, figure in {
                    "samples_per_second": self.rate(RECIPE, gpus),
                    "efficiency": self.efficiency(gpus),
                    "exposed_communication": self.exposed(gpus),
                    "host_cores": self.host_cores(gpus),
                    "sent_bytes": self.sent_bytes(gpus),
                    "power_w": self.power(gpus),
                }.items()
            }
            for gpus in self.counts
        }
        return {
            "precision": self.plan.precision,
            "absent": dict(self.plan.absent),
            "failures": self.failures(),
            "gains": {name: asdict(gain) for name, gain in self.gains().items()},
            "by_gpus": by_gpus,
            "slowdown_without_links": asdict(self.slowdown_without_links()),
            "roofline": None
            if found is None
            else {
                "step_ms": found.step_ms,
                "busy_ms": found.busy_ms,
                "mix": found.mix,
                "share": found.share if self.hardware is not None else None,
                "known": found.known,
                "tensor_cores": found.tensor_cores,
                "products_known": found.products_known,
                "kernels": [asdict(each) for each in found.positions],
            },
            "measurements": [{**asdict(each), "figures": _without_kernels(each.figures)} for each in self.outcomes],
        }


def _ratio(of: Known, to: Known) -> Known:
    if of.value is None or to.value is None:
        return Known(None, of.why if of.value is None else to.why)
    return Known(of.value / to.value)


def _without_kernels(figures: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if figures is None else {name: value for name, value in figures.items() if name != "kernels"}
