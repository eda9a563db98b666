"""Examine the GPU of one rank and, on the first rank of each machine, the node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import torch

from common.distributed.rank_info import RankInfo
from common.doctor import health, host
from common.doctor.compute import Durations, measure_gpu
from common.doctor.facts import collect_facts
from common.doctor.reading import Reading, Readings, failures
from common.doctor.storage import read_data, read_output, read_storage
from common.errors import DeviceError
from common.observe.nvml import bus_id, device_uuid, open_nvml

CHECKS = ("host", "gpu", "compute", "storage", "collectives", "clock")


@dataclass(frozen=True)
class Effort:
    """Durations and sizes of the measurements.

    Attributes:
        storage_bytes, storage_seconds: upper limits of a storage measurement.
    """

    gpu: Durations
    host_seconds: float
    storage_bytes: int
    storage_seconds: float
    collective_seconds: float


FULL = Effort(Durations(10.0, 1.0), 2.0, 4 << 30, 20.0, 1.0)
QUICK = Effort(Durations(2.0, 0.3), 0.3, 512 << 20, 5.0, 0.2)


@dataclass(frozen=True)
class CheckRequest:
    """Checks to run, with their options.

    Attributes:
        storage: files and folders whose read bandwidth to measure.
        cpus_allowed: CPUs that the job may use, read before the rank was bound to some of them.
        data_dir: folder with prepared data that every node should have; None skips the check.
        marker: file of rank 0 in the output folder that every node should see; None skips the check.
        unmarked: reason why rank 0 could not write that file; else empty.
    """

    checks: frozenset[str]
    effort: Effort
    storage: tuple[Path, ...]
    cpus_allowed: frozenset[int]
    data_dir: Path | None = None
    marker: Path | None = None
    unmarked: str = ""


@dataclass
class Report:
    """Results of one rank.

    Attributes:
        model, bus_id: model and PCI bus ID of the GPU; empty without one.
        unusable: reason why the GPU of this rank cannot be used; empty if it can, or if there is none.
        node: readings of the machine, on its first rank; on other ranks only failures.
        host_copy_gbs: host memory bandwidth of this rank in GB/s, while the machine's other ranks measure too.
        facts: facts about the machine (see :mod:`common.doctor.facts`), on its first rank.
    """

    model: str = ""
    bus_id: str = ""
    unusable: str = ""
    gpu: Readings = field(default_factory=dict)
    node: Readings = field(default_factory=dict)
    host_copy_gbs: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, for the store."""
        return {
            **vars(self),
            "gpu": {name: reading.to_json() for name, reading in self.gpu.items()},
            "node": {name: reading.to_json() for name, reading in self.node.items()},
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Report:
        """Return the report from the result of :meth:`to_json`."""
        readings = {
            scope: {name: Reading.from_json(value) for name, value in entry[scope].items()} for scope in ("gpu", "node")
        }
        return cls(**{**entry, **readings})


def examine(
    rank_info: RankInfo, device: torch.device, unusable: str, request: CheckRequest, together: Callable[[str], None]
) -> Report:
    """Run all checks of this rank that need no communication with other ranks.

    Args:
        unusable: reason why the GPU of this rank cannot be used; else empty.
        together: barrier before a measurement that all ranks make at the same time; its argument is the name.
    """
    report = Report(unusable=unusable)
    leads = rank_info.local_rank == 0
    if leads:
        report.facts = collect_facts()
        if "host" in request.checks:
            report.node |= host.read_node(request.cpus_allowed)
    if device.type == "cuda":
        report.model = torch.cuda.get_device_name(device)
    if "host" in request.checks:
        together("host memory")
        with failures(report.node, "memory_bandwidth_gbs"):
            seconds, ranks = request.effort.host_seconds, rank_info.local_world_size
            report.host_copy_gbs = host.host_memory_bandwidth(seconds, ranks)
    if device.type == "cuda":
        _examine_gpu(report, device, request, together)
    if leads and "storage" in request.checks:
        _examine_storage(report, request)
    return report


def _examine_gpu(report: Report, device: torch.device, request: CheckRequest, together: Callable[[str], None]) -> None:
    try:
        nvml = open_nvml()
        gpu = nvml.nvmlDeviceGetHandleByUUID(device_uuid(device))
        report.bus_id = bus_id(nvml, gpu)
    except (DeviceError, pynvml.NVMLError) as error:
        nvml = gpu = None
        if "gpu" in request.checks:
            report.gpu["driver_version"] = Reading(missing=f"NVML cannot be used: {error}")
    if gpu is not None and "gpu" in request.checks:
        report.gpu |= health.read_gpu(nvml, gpu)
        report.gpu |= health.read_xids(report.bus_id)
    if "compute" in request.checks:
        together("GPUs under load")
        watch = health.LoadWatch(nvml, gpu) if gpu is not None else None
        report.gpu |= measure_gpu(device, request.effort.gpu, watch or contextlib.nullcontext())
        report.gpu |= watch.readings() if watch is not None else {}
    if gpu is not None and "gpu" in request.checks:
        report.gpu |= health.read_links(nvml, gpu)


def _examine_storage(report: Report, request: CheckRequest) -> None:
    if request.unmarked:
        report.node["output_dir_shared"] = Reading(failed=request.unmarked)
    elif request.marker is not None:
        report.node["output_dir_shared"] = read_output(request.marker)
    if request.data_dir is not None:
        report.node["data_dir"] = read_data(request.data_dir)
    if not request.storage:
        report.node["storage_read_gbs"] = Reading(missing="no --storage PATH is given")
    for path in request.storage:
        name = "storage_read_gbs" if len(request.storage) == 1 else f"storage_read_gbs@{path}"
        report.node[name] = read_storage(path, request.effort.storage_bytes, request.effort.storage_seconds)
