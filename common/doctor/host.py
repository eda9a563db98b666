"""Read and measure a machine without its GPUs: CPUs, memory, user limits, network ports and versions."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

import torch

from common.distributed.environment import PROC, meminfo
from common.doctor.reading import Reading, Readings, Value, read
from common.launch.binding import read_siblings

SYSFS = Path("/sys")
GB = 1e9
COPY_BYTES = 1 << 30
ACTIVE_PORT = 4
"""Number of the InfiniBand port state ACTIVE (InfiniBand specification, PortState)."""


def read_node(cpus_allowed: Collection[int], sysfs: Path = SYSFS, proc: Path = PROC) -> Readings:
    """Return the readings of this machine that need no measurement.

    Args:
        cpus_allowed: CPUs that the job may use, read before any rank was bound to some of them.
    """
    memory = meminfo(proc)
    readings = {
        "cpu_model": _if_known(cpu_model(proc), "/proc/cpuinfo does not name it"),
        "cores_present": Reading(os.cpu_count() or 1),
        "cores_allowed": Reading(len(cpus_allowed)),
        "physical_cores_allowed": Reading(len(set(read_siblings(cpus_allowed, sysfs).values()))),
        "numa_nodes": _if_known(len(list(sysfs.glob("devices/system/node/node[0-9]*"))), "unknown to the kernel"),
        "cpu_governor": _governor(sysfs),
        "memory_gb": _if_known(memory.get("MemTotal", 0) / GB, "no /proc/meminfo"),
        "memory_free_gb": _if_known(memory.get("MemAvailable", 0) / GB, "no /proc/meminfo"),
        "hugepages": Reading(memory.get("HugePages_Total", 0)),
        "transparent_hugepages": _chosen(sysfs / "kernel/mm/transparent_hugepage/enabled"),
        "memlock_gb": Reading(_limit(resource.RLIMIT_MEMLOCK) / GB),
        "open_files": Reading(_limit(resource.RLIMIT_NOFILE)),
        "shared_memory_gb": read(lambda: shutil.disk_usage("/dev/shm").total / GB, {FileNotFoundError: "no /dev/shm"}),
        "shared_memory_free_gb": read(
            lambda: shutil.disk_usage("/dev/shm").free / GB, {FileNotFoundError: "no /dev/shm"}
        ),
        "temporary_free_gb": read(lambda: shutil.disk_usage(tempfile.gettempdir()).free / GB),
    }
    return {**readings, **_versions(), **_infiniband(sysfs)}


def cpu_model(proc: Path = PROC) -> str:
    """Return the processor name from the kernel; empty if unknown."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", (proc / "cpuinfo").read_text(), re.MULTILINE)
        return match[1].strip() if match else ""
    return ""


def operating_system() -> str:
    """Return name and version of the Linux distribution; empty if unknown."""
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return ""


def nccl_version() -> str:
    """Return the version of the NCCL that PyTorch uses; empty for a build without NCCL."""
    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def cudnn_version() -> str:
    """Return the version of the cuDNN that PyTorch uses; empty for a build without cuDNN."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if number is None:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def host_memory_bandwidth(seconds: float, ranks: int = 1) -> float:
    """Return the host memory bandwidth of a copy by this process, in GB/s; bytes read and written both count.

    Args:
        seconds: duration of the measurement.
        ranks: number of ranks on this machine, which all measure at the same time and share the free memory.
    """
    # Each of the two buffers, summed over all ranks, takes at most a sixteenth of the free memory.
    free = meminfo().get("MemAvailable", 16 * COPY_BYTES)
    size = min(COPY_BYTES, free // 16 // ranks)
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    copies, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not copies:
        target.copy_(source)
        copies += 1
    return 2 * size * copies / elapsed / GB


def infiniband_ports(sysfs: Path = SYSFS) -> list[tuple[str, bool, float]]:
    """Return name, whether active, and rate in Gbit/s of each InfiniBand port, including Ethernet ports (RoCE)."""
    ports = []
    for port in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        with contextlib.suppress(OSError, ValueError):
            state = (port / "state").read_text()
            rate = float((port / "rate").read_text().split()[0])
            ports.append((f"{port.parts[-3]}:{port.name}", int(state.partition(":")[0]) == ACTIVE_PORT, rate))
    return ports


def _infiniband(sysfs: Path) -> Readings:
    ports = infiniband_ports(sysfs)
    if not ports:
        return {name: Reading(missing="no InfiniBand here") for name in _PORT_FIGURES}
    active = [rate for _, is_active, rate in ports if is_active]
    return {
        "infiniband_ports": Reading(", ".join(f"{name} {rate:g} Gbit/s" for name, _, rate in ports)),
        "infiniband_active": Reading(len(active)),
        "infiniband_gbits": Reading(min(active)) if active else Reading(missing="no port is active"),
    }


_PORT_FIGURES = ("infiniband_ports", "infiniband_active", "infiniband_gbits")


def _versions() -> Readings:
    return {
        "kernel_version": Reading(platform.release()),
        "operating_system": _if_known(operating_system(), "no os-release"),
        "python_version": Reading(platform.python_version()),
        "torch_version": Reading(torch.__version__),
        "cuda_version": _if_known(torch.version.cuda or "", "PyTorch is a build without CUDA"),
        "nccl_version": _if_known(nccl_version(), "PyTorch is a build without NCCL"),
        "cudnn_version": _if_known(cudnn_version(), "PyTorch is a build without cuDNN"),
        "suite_version": Reading(suite_version()),
    }


def suite_version() -> str:
    """Return the version of the installed package, or ``not installed``."""
    try:
        return metadata.version("mlperf-suite")
    except metadata.PackageNotFoundError:
        return "not installed"


def _if_known(value: Value, why_not: str) -> Reading:
    return Reading(value) if value else Reading(missing=why_not)


def _limit(kind: int) -> float:
    soft = resource.getrlimit(kind)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def _governor(sysfs: Path) -> Reading:
    found = set()
    for path in sysfs.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"):
        with contextlib.suppress(OSError):
            found.add(path.read_text().strip())
    return _if_known(", ".join(sorted(found)), "the kernel does not set the CPUs' frequency here")


def _chosen(path: Path) -> Reading:
    """Return the chosen word (in brackets) of a kernel setting such as ``always [madvise] never``."""

    def word() -> str:
        match = re.search(r"\[(\w+)\]", path.read_text())
        return match[1] if match else path.read_text().strip()

    return read(word, {FileNotFoundError: "this kernel does not have the setting"})
