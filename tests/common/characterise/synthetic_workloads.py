"""Synthetic measurements of a workload, for tests of tables and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.characterise.variants import Plan
from common.characterise.workload import Characterised
from common.measure.jobs import Job
from common.measure.table import MeasuredCopy


def rank(host_cores: float = 0.5, **others: float | None) -> dict[str, Any]:
    """Return the figures of a rank."""
    known = {"sent_bytes": None, "power_w": None, "exposed_ms": None, "host_memory_bytes": 2_000_000_000}
    return {**known, "host_cores": host_cores, **others}


def figures(rate: float, *ranks: dict[str, Any], updated: bool = True, **others: Any) -> dict[str, Any]:
    """Return a report of ``bench``, whose step has 100 samples."""
    return {
        "samples_per_second": rate,
        "step_ms": 1e5 / rate,
        "updated": updated,
        "by_rank": list(ranks) or [rank()],
        "device": "CPU",
        "micro_batch": 100,
        "reserved_bytes": None,
        "joules": None,
        "provenance": {},
        "kernels": kernels({}),
        **others,
    }


def kernels(mix: Mapping[str, float]) -> dict[str, Any]:
    """Return the kernels of a step on a GPU: name to milliseconds."""
    return {"breakdown": {"kernels": {name: [ms, 1] for name, ms in mix.items()}, "busy_ms": sum(mix.values())}}


def characterised(
    benchmark: str,
    measured: Mapping[tuple[str, int], dict[str, Any] | str],
    precision: str = "bf16",
    absent: Mapping[str, str] | None = None,
    cpu: bool = False,
) -> Characterised:
    """Return a workload with these measurements.

    Args:
        measured: variant and number of GPUs to a report, or to the reason of a failure.
    """
    outcomes = []
    for (variant, gpus), found in measured.items():
        job = Job(benchmark, gpus, "1xH200", False, variant=variant)
        failed = isinstance(found, str)
        outcomes.append(MeasuredCopy(job, None if failed else found, found if failed else "", tuple(range(gpus))))
    plan = Plan([each.job for each in outcomes], precision, absent or {})
    return Characterised(benchmark, plan, outcomes, None, cpu)
