"""Write the measured values of a machine as a system file, whose section ``hardware`` `mlperf-suite estimate` reads."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.output_files import write_file
from common.doctor.findings import MeasuredUnit
from common.errors import ConfigError

NODE_HOP_US = 1.2
"""Microseconds of one message between two GPUs of a node. An all-reduce over n GPUs has 2 (n - 1) messages one after
the other. The rest of its time does not depend on n."""

DEFAULTS = {"overlap_slowdown": 0.7, "node_slowdown": 0.015, "gpu_spread": 0.007, "step_spread": 0.005}
"""Values that need training steps; those of configs/system/h200.yaml."""
NOT_MEASURED = "nodes_per_switch, switch_us, idle_gpu_watts, node_watts"

HEAD = """# Written by `mlperf-suite doctor --write-system`: medians over GPUs, collectives of the slowest node. For
# `mlperf-suite estimate --system FILE`.
"""
TAIL = f"""  # Not measured here, add them if you know them: {NOT_MEASURED}.
  # These need training steps; the values are those of H200 nodes:
"""


def hardware_section(units: Sequence[MeasuredUnit]) -> dict[str, Any]:
    """Return the section ``hardware`` from the readings of all units.

    Raises:
        ConfigError: there is no GPU, or a value that `estimate` needs was not measured.
    """
    gpus = [unit for unit in units if unit.scope == "gpu"]
    nodes = [unit for unit in units if unit.scope == "node"]
    if not gpus:
        raise ConfigError("--write-system: there is no GPU, and a system is described by its GPUs")
    gpus_per_node = len(gpus) // len(nodes)
    section: dict[str, Any] = {"gpu": gpus[0].model, "gpus_per_node": gpus_per_node}
    rates = {name: _median(gpus, f"matrix_{name}_tflops") for name in ("bf16", "fp16", "fp8")}
    section["tflops"] = {name: round(rate, 1) for name, rate in rates.items() if rate is not None}
    for name, figure in (("memory_gb", "memory_gb"), ("memory_gbs", "memory_copy_gbs"), ("gpu_watts", "power_limit_w")):
        value = _median(gpus, figure)
        if value is None and name != "gpu_watts":
            raise ConfigError(f"--write-system: {figure} was not measured: run the checks `gpu` and `compute`")
        if value is not None:
            section[name] = round(value, 1)
    small = _worst(nodes, "node_all_reduce_32kb_us", max)
    large = _worst(nodes, "node_all_reduce_1gb_gbs", min) or _worst(nodes, "node_all_reduce_64mb_gbs", min)
    if small is not None and large is not None:
        section["collective_us"] = round(max(0.0, small - 2 * (gpus_per_node - 1) * NODE_HOP_US), 1)
        section["node_link"] = {"latency_us": NODE_HOP_US, "gbs": round(large, 1)}
    for name, figure, digits in (
        ("cores_per_node", "physical_cores_allowed", 0),
        ("storage_gbs", "storage_read_gbs", 2),
    ):
        if value := _worst(nodes, figure, min):
            section[name] = round(value, digits) if digits else int(value)
    job = [unit for unit in units if unit.scope == "job"]
    network = _network(job, len(nodes), gpus_per_node, small, large)
    return {**section, **({} if network is None else {"network_link": network})}


def write_system(path: Path, units: Sequence[MeasuredUnit]) -> None:
    """Write a system file.

    Raises:
        ConfigError: see :func:`hardware_section`.
        SuiteError: the file cannot be written.
    """
    measured = _indented(hardware_section(units))
    text = f"{HEAD}name: {path.stem}\nhardware:\n{measured}{TAIL}{_indented(DEFAULTS)}"
    write_file(path, text)


def _network(
    job: Sequence[MeasuredUnit], nodes: int, gpus_per_node: int, small: float | None, large: float | None
) -> dict[str, float] | None:
    """Return the link between nodes per GPU, from an all-reduce over all GPUs; None if there was none.

    The ring of an all-reduce leaves a node through all of its GPUs' ports. If it is as fast as inside a node, the
    network may be faster than measured.
    """
    all_small = _median(job, "all_reduce_32kb_us")
    all_large = _median(job, "all_reduce_1gb_gbs") or _median(job, "all_reduce_64mb_gbs")
    if nodes < 2 or all_small is None or all_large is None:
        return None
    hops = 2 * (nodes - 1).bit_length()
    inside = 0.0 if small is None else small
    return {
        "latency_us": round(max(0.0, all_small - inside) / hops, 2),
        "gbs": round(min(all_large, large or all_large) / gpus_per_node, 2),
    }


def _values(units: Sequence[MeasuredUnit], figure: str) -> list[float]:
    found = (unit.readings[figure].value for unit in units if figure in unit.readings)
    return [float(value) for value in found if isinstance(value, int | float) and not isinstance(value, bool)]


def _median(units: Sequence[MeasuredUnit], figure: str) -> float | None:
    values = _values(units, figure)
    return statistics.median(values) if values else None


def _worst(units: Sequence[MeasuredUnit], figure: str, worst: Any) -> float | None:
    values = _values(units, figure)
    return float(worst(values)) if values else None


def _indented(content: Mapping[str, Any]) -> str:
    return "".join(f"  {key}: {json.dumps(value)}\n" for key, value in content.items())
