"""NVIDIA's management library (NVML): visible GPUs, their power and clocks, and the power mode vboost.

Only :func:`set_power_mode` changes a GPU, and a run calls it only if ``system.vboost`` is set. No function initialises
CUDA, except :func:`device_uuid` for a CUDA device. Arguments ``nvml`` take the module ``pynvml`` or an object with its
functions.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml
import torch

from common.errors import ConfigError, DeviceError

SAMPLE_SECONDS = 1.0
NVIDIA_SMI_SECONDS = 30.0
ALL_LINKS = 0xFFFFFFFF
"""Link number in NVML that stands for the sum over all NVLinks of a GPU."""


def open_nvml() -> Any:
    """Initialise NVML and return the module ``pynvml``.

    Raises:
        DeviceError: there is no driver, or its library cannot be used.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML cannot be used: {error}") from error
    return pynvml


def pci_bus_ids(environment: Mapping[str, str] | None = None, nvml: Any = None) -> list[str]:
    """Return PCI bus ids of the visible CUDA devices, in CUDA's order and in the sysfs form ``0000:ab:00.0``.

    ``CUDA_VISIBLE_DEVICES`` may have numbers, UUIDs or their prefixes, and MIG instances. As the CUDA C++ Programming
    Guide ("CUDA Environment Variables") says, devices after the first invalid entry are not visible. By default, CUDA
    puts the fastest GPU first; GPUs of one model are in the order of their bus ids.

    Args:
        nvml: None for the installed driver. Without a driver the list is empty.

    Raises:
        DeviceError: a GPU does not answer, or the order is unknown: the GPUs have different models, their numbers are
            needed, and ``CUDA_DEVICE_ORDER`` is not ``PCI_BUS_ID``.
    """
    environment = os.environ if environment is None else environment
    if nvml is None:
        try:
            nvml = open_nvml()
        except DeviceError:
            return []
    try:
        return _visible_bus_ids(environment, nvml)
    except pynvml.NVMLError as error:
        raise DeviceError(f"a GPU of this machine does not answer NVML: {error}. nvidia-smi says which") from error


def _visible_bus_ids(environment: Mapping[str, str], nvml: Any) -> list[str]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    ordered = sorted(handles, key=lambda handle: bus_id(nvml, handle))
    if entries is None or any(entry.isdecimal() for entry in entries):
        _require_known_order(ordered, environment, nvml)
    if entries is None:
        return [bus_id(nvml, handle) for handle in ordered]
    chosen: list[str] = []
    uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in ordered]
    for entry in entries:
        handle = _visible_device(entry, ordered, uuids, nvml)
        if handle is None:
            break
        chosen.append(bus_id(nvml, handle))
    # If a device is named twice, CUDA shows no device at all. MIG instances of one GPU share its bus id.
    twice = len(set(chosen)) < len(chosen) and not any(entry.startswith("MIG-") for entry in entries)
    return [] if twice else chosen


def bus_id(nvml: Any, handle: Any) -> str:
    """Return the PCI bus id of a GPU in sysfs form. NVML uses an eight-digit domain and upper case instead."""
    text = nvml.nvmlDeviceGetPciInfo(handle).busId
    domain, _, rest = (text.decode() if isinstance(text, bytes) else str(text)).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _require_known_order(handles: Sequence[Any], environment: Mapping[str, str], nvml: Any) -> None:
    models = {str(nvml.nvmlDeviceGetName(handle)) for handle in handles}
    if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise DeviceError(
            f"this machine has GPUs of {len(models)} models ({', '.join(sorted(models))}), which CUDA orders by speed: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that their numbers are known"
        )


def _visible_device(entry: str, handles: Sequence[Any], uuids: Sequence[str], nvml: Any) -> Any:
    """Return the NVML handle of an entry of ``CUDA_VISIBLE_DEVICES``; None if the entry is invalid."""
    if entry.isdecimal():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(entry))
        except pynvml.NVMLError:
            return None
    matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def device_uuid(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device in the form of NVML, read through CUDA; None for other devices."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


class GpuMeter:
    """Reads power, clocks, temperature and utilization of one GPU periodically in a separate thread.

    Without NVML or without the GPU, all results are empty. Values that the GPU does not report are omitted.

    Args:
        uuid: UUID of the GPU from :func:`device_uuid`; None to measure nothing.
        nvml: NVML module; None to open the real one.
        interval_seconds: time between two readings.
    """

    def __init__(self, uuid: str | None, nvml: Any = None, interval_seconds: float = SAMPLE_SECONDS) -> None:
        self._nvml: Any = nvml
        self._handle: Any = None
        self._interval = interval_seconds
        self._closing = threading.Event()
        self._fresh: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._energy_at_start: float | None = None
        if uuid is None:
            return
        try:
            self._nvml = nvml if nvml is not None else open_nvml()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except (DeviceError, pynvml.NVMLError):
            return
        self._energy_at_start = self._energy()
        self._fresh = self.read()
        self._thread = threading.Thread(target=self._run, name="gpu meter", daemon=True)
        self._thread.start()

    def read(self) -> dict[str, float]:
        """Return the current values that the GPU reports. Names end with the unit, for example ``power_w``."""
        nvml, handle = self._nvml, self._handle
        if handle is None:
            return {}
        readings: dict[str, Callable[[], float]] = {
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        }
        figures = {}
        for name, reading in readings.items():
            with contextlib.suppress(pynvml.NVMLError):
                figures[name] = float(reading())
        return figures

    def sample(self) -> dict[str, float]:
        """Return the latest reading, or nothing if it was already returned. Never waits for the GPU."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def means(self) -> dict[str, float]:
        """Return the mean of each value over the thread's readings since the last call; empty without readings."""
        with self._lock:
            found = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._sums, self._counts = {}, {}
        return found

    def energy_joules(self) -> float | None:
        """Return the energy that the GPU used since this meter was created; None if the GPU does not report it."""
        now = self._energy()
        return None if now is None or self._energy_at_start is None else now - self._energy_at_start

    def sent_bytes(self) -> float | None:
        """Return a count of the bytes that the GPU sends over all its NVLinks; None if the GPU does not report it."""
        if self._handle is None:
            return None
        try:
            field = self._nvml.nvmlDeviceGetFieldValues(
                self._handle, [(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS)]
            )[0]
        except pynvml.NVMLError:
            return None
        return float(field.value.ullVal) * 1024 if field.nvmlReturn == pynvml.NVML_SUCCESS else None

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _energy(self) -> float | None:
        if self._handle is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except pynvml.NVMLError:
            return None

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            figures = self.read()
            with self._lock:
                for name, value in figures.items():
                    self._sums[name] = self._sums.get(name, 0.0) + value
                    self._counts[name] = self._counts.get(name, 0) + 1
            self._fresh = figures


def open_meter(device: torch.device, vboost: int | None, stack: contextlib.ExitStack) -> GpuMeter:
    """Return the meter of a device until ``stack`` ends.

    Args:
        vboost: level of the power slider until then; None does not change it.

    Raises:
        ConfigError, DeviceError: see :func:`set_power_mode`.
    """
    uuid = device_uuid(device)
    if vboost is not None and uuid is not None:
        stack.callback(set_power_mode(vboost, uuid))
    meter = GpuMeter(uuid)
    stack.callback(meter.close)
    return meter


def set_power_mode(level: int, gpu: str) -> Callable[[], None]:
    """Move power from a GPU's memory system to its tensor cores: ``nvidia-smi boost-slider --vboost``.

    The public NVML has no call for this. The level applies to all processes until it is set back, so call the returned
    function at the end of the run. If the process is killed, the GPU keeps the new level.

    Args:
        level: 0 is the default of the driver; NVIDIA's submissions of large language models use 1.
        gpu: UUID or PCI bus id.

    Returns:
        A function that restores the previous level and can raise DeviceError, too.

    Raises:
        ConfigError: the level is negative, or above the highest level of the GPU.
        DeviceError: the option is not permitted, or this GPU or driver does not have it.
    """
    if level < 0:
        raise ConfigError(f"vboost={level}: the levels start at 0")
    found, highest = _power_mode(gpu)
    if level > highest:
        raise ConfigError(f"vboost={level}: the highest level of GPU {gpu} is {highest}")
    _apply_power_mode(level, gpu)
    return lambda: _apply_power_mode(found, gpu)


def _apply_power_mode(level: int, gpu: str) -> None:
    output = _nvidia_smi(gpu, "--vboost", str(level))
    if _power_mode(gpu)[0] != level:
        raise DeviceError(f"vboost={level} was not taken by GPU {gpu}; nvidia-smi: {output or 'says nothing'}")


def _power_mode(gpu: str) -> tuple[int, int]:
    """Return the current and the highest level. They are in a row such as ``| 0  vboost  4  0 |``, highest first."""
    output = _nvidia_smi(gpu, "--list")
    for line in output.splitlines():
        numbers = re.findall(r"\d+", line.partition("vboost")[2])
        if len(numbers) >= 2:
            return int(numbers[-1]), int(numbers[-2])
    raise DeviceError(f"GPU {gpu} has no vboost: nvidia-smi: {' '.join(output.split()) or 'says nothing'}")


def _nvidia_smi(gpu: str, *arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise DeviceError("vboost needs nvidia-smi, which is not on the PATH")
    line = [program, "boost-slider", "-i", gpu, *arguments]
    try:
        answer = subprocess.run(line, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{' '.join(line)}: {error}") from error
    output = answer.stdout.strip() or answer.stderr.strip()
    if answer.returncode != 0:
        words = " ".join(output.split()) or f"exit code {answer.returncode}"
        raise DeviceError(
            f"vboost of GPU {gpu} cannot be {'read' if '--list' in arguments else 'set'}: nvidia-smi: {words}. "
            "Root may set it before the run (nvidia-smi boost-slider --vboost LEVEL); leave system.vboost unset then"
        )
    return output
