"""Collect the fields of an MLPerf system description that a machine can report, under their official names."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml
import torch

from common.distributed.environment import PROC, meminfo
from common.doctor.host import (
    SYSFS,
    cpu_model,
    cudnn_version,
    infiniband_ports,
    nccl_version,
    operating_system,
)
from common.errors import DeviceError
from common.observe.nvml import open_nvml

NO_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|fd)\d*")
SMALLEST_DISK = 10**9
COMMAND_SECONDS = 20.0

Facts = dict[str, str | dict[str, str]]


def collect_facts(nvml: Any = None, sysfs: Path = SYSFS, proc: Path = PROC) -> Facts:
    """Return the fields as strings; a field that this machine does not report is empty, never guessed.

    Field names follow MLCommons' system description checker. Core counts and caches are per processor, capacities per
    node.

    Args:
        nvml: NVML module; None opens that of the driver.
        sysfs, proc: mount points of the kernel's file systems.
    """
    if nvml is None:
        with contextlib.suppress(DeviceError):
            nvml = open_nvml()
    return {
        **_processor(_lscpu(), proc),
        **_memory(proc),
        **_storage(sysfs),
        "host_networking": _networking(sysfs),
        **_accelerators(nvml),
        "operating_system": operating_system(),
        "framework": f"PyTorch {torch.__version__}",
        "other_software_stack": _software(nvml),
    }


def _processor(lscpu: dict[str, str], proc: Path) -> Facts:
    caches = [f"{kind} {lscpu[f'{kind} cache']}" for kind in ("L1d", "L1i", "L2", "L3") if f"{kind} cache" in lscpu]
    megahertz = lscpu.get("CPU max MHz", "").replace(",", ".").partition(".")[0]
    return {
        "host_processor_model_name": cpu_model(proc) or lscpu.get("Model name", ""),
        "host_processors_per_node": lscpu.get("Socket(s)", ""),
        "host_processor_core_count": lscpu.get("Core(s) per socket", ""),
        "host_processor_vcpu_count": lscpu.get("CPU(s)", ""),
        "host_processor_frequency": f"{megahertz} MHz" if megahertz.isdecimal() else "",
        "host_processor_caches": ", ".join(caches),
        "host_processor_interconnect": "",  # the kernel does not report it
    }


def _memory(proc: Path) -> Facts:
    total = meminfo(proc).get("MemTotal", 0)
    return {
        "host_memory_capacity": f"{total / 2**30:.0f} GiB" if total else "",
        "host_memory_configuration": _memory_modules(_run("dmidecode", "-t", "memory")),
    }


def _memory_modules(dmidecode: str) -> str:
    """Return text such as ``16x 64 GB DDR5 4800 MT/s`` from the output of dmidecode; empty if there is no output."""
    modules: Counter[str] = Counter()
    for block in dmidecode.split("Memory Device")[1:]:
        fields = dict(re.findall(r"^\s+(Size|Type|Speed): (.+)$", block, re.MULTILINE))
        if re.match(r"\d", fields.get("Size", "")):
            kind = [
                value for name in ("Size", "Type", "Speed") if (value := fields.get(name, "")) not in ("", "Unknown")
            ]
            modules[" ".join(kind)] += 1
    return ", ".join(f"{count}x {kind}" for kind, count in modules.items())


def _storage(sysfs: Path) -> Facts:
    kinds: dict[str, Counter[str]] = {}
    for disk in sorted(sysfs.glob("block/*")):
        with contextlib.suppress(OSError, ValueError):
            size = int((disk / "size").read_text()) * 512
            if size >= SMALLEST_DISK and not NO_DISK.fullmatch(disk.name):
                kinds.setdefault(_disk_kind(disk), Counter())[_terabytes(size)] += 1
    return {
        "host_storage_type": ", ".join(kinds),
        "host_storage_capacity": ", ".join(f"{n}x {size}" for sizes in kinds.values() for size, n in sizes.items()),
    }


def _disk_kind(disk: Path) -> str:
    if disk.name.startswith("nvme"):
        return "NVMe SSD"
    if disk.name.startswith("vd"):
        return "virtual disk"  # only the host of the virtual machine knows its kind
    return "HDD" if (disk / "queue/rotational").read_text().strip() == "1" else "SSD"


def _terabytes(size: int) -> str:
    return f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"


def _networking(sysfs: Path) -> str:
    links: Counter[str] = Counter()
    for name, is_active, rate in infiniband_ports(sysfs):
        layer = _text(sysfs / "class/infiniband" / name.replace(":", "/ports/") / "link_layer")
        if is_active and layer != "Ethernet":  # RoCE ports are among the network devices below
            links[f"InfiniBand {rate:g} Gbit/s"] += 1
    for device in sorted(sysfs.glob("class/net/*/device")):
        speed, kind = _text(device.parent / "speed"), _text(device.parent / "type")
        if kind == "1" and speed.isdecimal():  # 1: ARPHRD_ETHER
            links[f"Ethernet {int(speed) / 1000:g} Gbit/s"] += 1
    return ", ".join(f"{count}x {kind}" for kind, count in links.items())


def _accelerators(nvml: Any) -> Facts:
    names = (
        "accelerator_model_name",
        "accelerator_host_interconnect",
        "accelerator_frequency",
        "accelerator_memory_capacity",
        "accelerator_memory_configuration",
        "accelerator_interconnect",
    )
    facts: Facts = {"accelerators_per_node": "0", **dict.fromkeys(names, "")}
    if nvml is None:
        return facts
    count = int(nvml.nvmlDeviceGetCount())
    facts["accelerators_per_node"] = str(count)
    with contextlib.suppress(pynvml.NVMLError):  # other checks of `doctor` report a lost GPU
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        if handles:
            facts.update(zip(names, _of_gpus(nvml, handles), strict=True))
    return facts


def _of_gpus(nvml: Any, handles: Sequence[Any]) -> list[str]:
    """Return the fields of the accelerators: all different models; the other fields are those of the first GPU."""
    gpu = handles[0]
    readings: list[Callable[[], str]] = [
        lambda: ", ".join(sorted({str(nvml.nvmlDeviceGetName(handle)) for handle in handles})),
        lambda: f"PCIe Gen{nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)}",
        lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)} MHz",
        lambda: f"{nvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**30:.0f} GiB",
        lambda: f"{nvml.nvmlDeviceGetMemoryBusWidth(gpu)}-bit bus",
        lambda: _nvlink(nvml, gpu),
    ]
    values = []
    for reading in readings:
        try:
            values.append(reading())
        except pynvml.NVMLError:
            values.append("")
    return values


def _nvlink(nvml: Any, gpu: Any) -> str:
    from common.doctor.health import nvlinks

    active, gigabytes = nvlinks(nvml, gpu)
    return f"{active}x NVLink, {gigabytes:.0f} GB/s each way" if active else ""


def _software(nvml: Any) -> dict[str, str]:
    driver = ""
    if nvml is not None:
        with contextlib.suppress(pynvml.NVMLError):
            driver = str(nvml.nvmlSystemGetDriverVersion())
    return {
        "cuda_version": torch.version.cuda or "",
        "cuda_driver_version": driver,
        "nccl_version": nccl_version(),
        "cudnn_version": cudnn_version(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "kernel_version": platform.release(),
    }


def _lscpu() -> dict[str, str]:
    lines = (line.partition(":") for line in _run("lscpu").splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _run(*command: str) -> str:
    """Return the output of a command; empty if the command is missing, not permitted, or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        answer = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
