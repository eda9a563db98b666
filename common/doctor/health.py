"""Read the state of a GPU from NVML and the kernel log: errors, links, limits, and slowdowns under load."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml

from common.doctor.reading import Reading, Readings, Value

SAMPLE_SECONDS = 0.1
KERNEL_LOG_SECONDS = 20.0
APPLICATION_XIDS = frozenset({13, 31, 43, 45})
"""XIDs that are usually caused by the program (NVIDIA, "XID Errors": 13 graphics exception, 31 MMU fault, 43 GPU
stopped processing, 45 preemptive cleanup). All others count as errors of the hardware or driver."""
XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")

HARDWARE_SLOWDOWN = (
    pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
)
CLOCK_LIMITS = {
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "application clocks are set",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware slowdown for heat",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "driver slowdown for heat",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
}
"""Names of the reasons that limit a GPU's clock; the low clock of an idle GPU is not included."""
NVLINKS = 18
"""Largest number of NVLinks per GPU, up to Blackwell (NVML's NVML_NVLINK_MAX_LINKS)."""


def read_gpu(nvml: Any, gpu: Any) -> Readings:
    """Return the state of a GPU; call this before any load."""
    read = _NvmlReader()
    read("driver_version", lambda: str(nvml.nvmlSystemGetDriverVersion()))
    read("vbios_version", lambda: str(nvml.nvmlDeviceGetVbiosVersion(gpu)))
    read("memory_gb", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total / 1e9)
    read("memory_used_gb", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9)
    read("idle_temperature_c", lambda: nvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
    read("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)
    read("power_limit_default_w", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000)
    read("max_sm_clock_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM))
    read("clocks_limited", lambda: _clock_limits(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)))
    read("persistence_mode", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(gpu)))
    read("mig_enabled", lambda: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]))
    _read_errors(read, nvml, gpu)
    _read_nvlinks(read, nvml, gpu)
    return read.readings


def read_links(nvml: Any, gpu: Any) -> Readings:
    """Return the current state of the PCIe link; an idle GPU reduces the generation, so call this after load."""
    read = _NvmlReader()
    read("pcie_generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu))
    read("pcie_generation_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu))
    read("pcie_width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu))
    read("pcie_width_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))
    return read.readings


def nvlinks(nvml: Any, gpu: Any) -> tuple[int, float]:
    """Return the number of active NVLinks of a GPU, and their total bandwidth in GB/s per direction.

    Raises:
        pynvml.NVMLError: the GPU has no NVLink.
    """
    active, megabytes = 0, 0.0
    for link in range(NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(gpu, link):
                continue
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
            if link == 0:
                raise
            break
        active += 1
        field = nvml.nvmlDeviceGetFieldValues(gpu, [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)])[0]
        if field.nvmlReturn == pynvml.NVML_SUCCESS:
            megabytes += field.value.uiVal
    return active, megabytes / 1000


def count_xids(bus_id: str, log: str) -> Counter[int]:
    """Return how often each XID occurs for the GPU at ``bus_id`` (such as ``0000:ab:00.0``) in a kernel log."""
    device = bus_id.rpartition(".")[0].lower()  # the log omits the PCI function
    return Counter(int(xid) for where, xid in XID_LINE.findall(log) if where.lower().startswith(device))


def read_xids(bus_id: str) -> Readings:
    """Return the number of XID errors since boot, from the kernel log if it is readable."""
    names = ("xid_hardware", "xid_application")
    log, why_not = _kernel_log()
    if log is None:
        return {name: Reading(missing=why_not) for name in names}
    xids = count_xids(bus_id, log)
    application = sum(count for xid, count in xids.items() if xid in APPLICATION_XIDS)
    return {"xid_hardware": Reading(xids.total() - application), "xid_application": Reading(application)}


class LoadWatch:
    """Context that samples power, clocks, temperature and slowdowns of a GPU under load, in a separate thread."""

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._stop = threading.Event()
        self._samples: dict[str, list[float]] = {}
        self._errors: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="load watch", daemon=True)

    def __enter__(self) -> LoadWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> None:
        """Record one sample of each value."""
        nvml, gpu = self._nvml, self._gpu
        self._note("power", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        self._note("sm_clock", lambda: nvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
        self._note("memory_clock", lambda: nvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM))
        self._note("temperature", lambda: nvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
        self._note("reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))

    def readings(self) -> Readings:
        """Return mean power and clocks, the highest temperature, and the percentage of time with each slowdown."""
        return {
            "load_power_w": self._of("power", _mean),
            "load_sm_clock_mhz": self._of("sm_clock", _mean),
            "load_memory_clock_mhz": self._of("memory_clock", _mean),
            "load_temperature_c": self._of("temperature", max),
            "hw_slowdown_percent": self._share(HARDWARE_SLOWDOWN),
            "thermal_slowdown_percent": self._share(pynvml.nvmlClocksEventReasonSwThermalSlowdown),
            "power_cap_percent": self._share(pynvml.nvmlClocksEventReasonSwPowerCap),
        }

    def _note(self, name: str, reading: Callable[[], float]) -> None:
        try:
            self._samples.setdefault(name, []).append(reading())
        except pynvml.NVMLError as error:
            self._errors[name] = str(error)

    def _of(self, name: str, combine: Callable[[list[float]], float]) -> Reading:
        # Skip the first quarter, in which the GPU has not reached the steady state.
        samples = self._samples.get(name, [])
        steady = samples[len(samples) // 4 :]
        return Reading(combine(steady)) if steady else Reading(missing=self._errors.get(name, "no sample"))

    def _share(self, bits: int) -> Reading:
        return self._of("reasons", lambda reasons: 100.0 * _mean([bool(int(reason) & bits) for reason in reasons]))

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()


class _NvmlReader:
    """Callable that queries NVML and collects the readings; an unsupported query gives a reading without a value."""

    def __init__(self) -> None:
        self.readings: Readings = {}

    def __call__(self, name: str, query: Callable[[], Value]) -> None:
        try:
            self.readings[name] = Reading(query())
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_InvalidArgument):
            self.readings[name] = Reading(missing="this GPU or driver does not report it")
        except pynvml.NVMLError_NoPermission:
            self.readings[name] = Reading(missing="not permitted")
        except pynvml.NVMLError as error:
            self.readings[name] = Reading(failed=f"NVML: {error}")


def _read_errors(read: _NvmlReader, nvml: Any, gpu: Any) -> None:
    uncorrected, corrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    read("ecc_enabled", lambda: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]))
    for name, kind, counter in (
        ("ecc_uncorrected_volatile", uncorrected, pynvml.NVML_VOLATILE_ECC),
        ("ecc_uncorrected_aggregate", uncorrected, pynvml.NVML_AGGREGATE_ECC),
        ("ecc_corrected_volatile", corrected, pynvml.NVML_VOLATILE_ECC),
    ):
        read(name, partial(nvml.nvmlDeviceGetTotalEccErrors, gpu, kind, counter))
    read("remapped_rows", lambda: nvml.nvmlDeviceGetRemappedRows(gpu)[1])
    read("remapping_pending", lambda: bool(nvml.nvmlDeviceGetRemappedRows(gpu)[2]))
    read("remapping_failed", lambda: bool(nvml.nvmlDeviceGetRemappedRows(gpu)[3]))
    if read.readings["remapping_pending"].missing:  # GPUs before Ampere retire pages instead
        read("remapping_pending", lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)))


def _read_nvlinks(read: _NvmlReader, nvml: Any, gpu: Any) -> None:
    try:
        active, gigabytes = nvlinks(nvml, gpu)
    except pynvml.NVMLError as error:
        read.readings |= dict.fromkeys(("nvlinks_active", "nvlink_gbs"), Reading(missing=f"no NVLink here ({error})"))
        return
    read.readings["nvlinks_active"] = Reading(active)
    is_known = active == 0 or gigabytes > 0
    read.readings["nvlink_gbs"] = Reading(gigabytes) if is_known else Reading(missing="this driver does not report it")


def _clock_limits(reasons: int) -> str:
    return ", ".join(name for bit, name in CLOCK_LIMITS.items() if reasons & bit) or "none"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _kernel_log() -> tuple[str | None, str]:
    """Return the kernel log since boot, or None and the reason why it cannot be read."""
    why_not = "there is neither dmesg nor journalctl"
    for command in (["journalctl", "--dmesg", "--boot", "--quiet", "--no-pager"], ["dmesg"]):
        program = shutil.which(command[0])
        if program is None:
            continue
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(
                [program, *command[1:]], capture_output=True, text=True, errors="replace",
                timeout=KERNEL_LOG_SECONDS, check=False,
            )  # fmt: skip
            # Without permission to read it, journalctl prints nothing and succeeds.
            if answer.returncode == 0 and answer.stdout.strip():
                return answer.stdout, ""
        why_not = "the kernel's log may not be read"
    return None, why_not
