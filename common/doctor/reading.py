"""Results of checks (a value, or the reason why there is none), and the table of all readings with their units."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Value = float | int | str | bool
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Reading:
    """One reading of a GPU, a node or the job.

    Attributes:
        value: value in the unit of its :class:`Measure`; None if there is none.
        missing: reason why the check could not run, such as missing hardware or permission; it counts as not made.
        failed: error of a check that should have worked; it counts as failed.
    """

    value: Value | None = None
    missing: str = ""
    failed: str = ""

    def to_json(self) -> Any:
        """Return the value, or an object with the reason; infinity, which JSON lacks, becomes ``unlimited``."""
        if self.failed:
            return {"failed": self.failed}
        if self.missing:
            return {"missing": self.missing}
        return UNLIMITED if self.value == math.inf else self.value

    @classmethod
    def from_json(cls, entry: Any) -> Reading:
        """Return the reading from the result of :meth:`to_json`."""
        if isinstance(entry, dict):
            return cls(**entry)
        return cls(math.inf if entry == UNLIMITED else entry)


Readings = dict[str, Reading]
Scope = Literal["gpu", "node", "job"]


@dataclass(frozen=True)
class Measure:
    """Description of a reading: name, unit, and how units are compared.

    Attributes:
        unit: unit of numbers; empty for counts and texts.
        heading: column heading in the table; empty for readings that are only in the JSON file.
        better: direction of better values; None if units are not compared by size.
        spread: percentage by which a value may be worse than the median of the units of the same model (of two units:
            than the better one).
        equal: whether all units must have the same value.
        magnitude: whether limits apply to the absolute value.
        digits: number of decimals in messages.
    """

    title: str
    unit: str = ""
    heading: str = ""
    better: Literal["higher", "lower"] | None = None
    spread: float = 10.0
    equal: bool = False
    magnitude: bool = False
    digits: int = 0

    def show(self, value: Value) -> str:
        """Return the value with its unit as text."""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, str):
            return value
        # Small values keep one decimal, so that a low rate is not shown as zero.
        digits = max(self.digits, 1) if abs(value) < 10 and value != round(value) else self.digits
        text = UNLIMITED if math.isinf(value) else f"{value:,.{digits}f}"
        return f"{text} {self.unit}".strip()


MEASURES: dict[Scope, dict[str, Measure]] = {
    "gpu": {
        "driver_version": Measure("driver", equal=True),
        "vbios_version": Measure("VBIOS"),
        "matrix_bf16_tflops": Measure("matrix product in bf16", "TFLOP/s", "bf16", "higher", 5.0),
        "matrix_fp16_tflops": Measure("matrix product in fp16", "TFLOP/s", "fp16", "higher", 5.0),
        "matrix_fp8_tflops": Measure("matrix product in fp8", "TFLOP/s", "fp8", "higher", 5.0),
        "matrix_repeats": Measure("matrix products repeat bit for bit"),
        "memory_copy_gbs": Measure("memory bandwidth of a copy", "GB/s", "memory", "higher", 5.0),
        "host_to_device_gbs": Measure("bandwidth from host to GPU", "GB/s", "to GPU", "higher", 15.0, digits=1),
        "device_to_host_gbs": Measure("bandwidth from GPU to host", "GB/s", "from GPU", "higher", 15.0, digits=1),
        "load_power_w": Measure("power under load", "W", "power"),
        "load_sm_clock_mhz": Measure("SM clock under load", "MHz", "SM clock", "higher", 8.0),
        "load_memory_clock_mhz": Measure("memory clock under load", "MHz", better="higher", spread=1.0),
        "load_temperature_c": Measure("temperature under load", "°C", "temp."),
        "hw_slowdown_percent": Measure("time under load slowed down by hardware (heat or power brake)", "%", digits=1),
        "thermal_slowdown_percent": Measure("time under load slowed down by the driver for heat", "%", digits=1),
        "power_cap_percent": Measure("time under load at the power limit", "%", "at limit"),
        "idle_temperature_c": Measure("temperature before the load", "°C"),
        "power_limit_w": Measure("power limit", "W", equal=True),
        "power_limit_default_w": Measure("power limit of the board", "W"),
        "max_sm_clock_mhz": Measure("highest SM clock", "MHz", equal=True),
        "clocks_limited": Measure("clock limits in force before the load"),
        "pcie_generation": Measure("PCIe generation"),
        "pcie_generation_max": Measure("highest PCIe generation"),
        "pcie_width": Measure("PCIe lanes", heading="PCIe x"),
        "pcie_width_max": Measure("highest number of PCIe lanes"),
        "nvlinks_active": Measure("active NVLinks", heading="NVLinks", better="higher", spread=0.0),
        "nvlink_gbs": Measure("NVLink bandwidth each way", "GB/s", better="higher", spread=1.0),
        "ecc_enabled": Measure("ECC", equal=True),
        "ecc_uncorrected_volatile": Measure("uncorrected ECC errors since the driver was loaded", heading="ECC"),
        "ecc_uncorrected_aggregate": Measure("uncorrected ECC errors in the GPU's life"),
        "ecc_corrected_volatile": Measure("corrected ECC errors since the driver was loaded"),
        "remapped_rows": Measure("memory rows remapped after uncorrected errors"),
        "remapping_pending": Measure("row remapping or page retirement waits for a reset"),
        "remapping_failed": Measure("row remapping failed"),
        "xid_hardware": Measure("XID errors of the hardware since boot", heading="XIDs"),
        "xid_application": Measure("XID errors of applications since boot"),
        "persistence_mode": Measure("persistence mode", equal=True),
        "mig_enabled": Measure("MIG", equal=True),
        "memory_used_gb": Measure("GPU memory in use before the load", "GB", digits=1),
        "memory_gb": Measure("GPU memory", "GB", digits=1, better="higher", spread=1.0),
    },
    "node": {
        "cpu_model": Measure("CPU", equal=True),
        "cores_present": Measure("CPUs present", equal=True),
        "cores_allowed": Measure("CPUs that this job may use", heading="CPUs", better="higher", spread=0.0),
        "physical_cores_allowed": Measure("physical cores that this job may use"),
        "numa_nodes": Measure("NUMA nodes", heading="NUMA", equal=True),
        "cpu_governor": Measure("CPU governor", equal=True),
        "memory_gb": Measure("memory", "GB", "memory", "higher", 2.0),
        "memory_free_gb": Measure("free memory", "GB"),
        "memory_bandwidth_gbs": Measure("host memory bandwidth of a copy", "GB/s", "copy", "higher", 25.0, digits=1),
        "memlock_gb": Measure("memory that may be locked (ulimit -l)", "GB", "memlock", digits=2),
        "open_files": Measure("files that may be open (ulimit -n)", heading="files"),
        "shared_memory_gb": Measure("shared memory (/dev/shm)", "GB", "shm", digits=1),
        "shared_memory_free_gb": Measure("free shared memory (/dev/shm)", "GB", digits=1),
        "temporary_free_gb": Measure("free space for temporary files", "GB", digits=1),
        "hugepages": Measure("huge pages reserved"),
        "transparent_hugepages": Measure("transparent huge pages", equal=True),
        "kernel_version": Measure("kernel", heading="kernel", equal=True),
        "operating_system": Measure("operating system", equal=True),
        "python_version": Measure("Python", equal=True),
        "torch_version": Measure("PyTorch", equal=True),
        "cuda_version": Measure("CUDA of PyTorch", equal=True),
        "nccl_version": Measure("NCCL", equal=True),
        "cudnn_version": Measure("cuDNN", equal=True),
        "suite_version": Measure("mlperf-suite", equal=True),
        "gpus": Measure("GPUs in use", heading="GPUs", equal=True),
        "infiniband_ports": Measure("InfiniBand ports", equal=True),
        "infiniband_active": Measure("active InfiniBand ports", heading="IB", better="higher", spread=0.0),
        "infiniband_gbits": Measure("rate of the slowest active InfiniBand port", "Gbit/s", "IB rate", "higher", 0.0),
        "clock_offset_ms": Measure("clock ahead of rank 0", "ms", "clock", magnitude=True, digits=2),
        "output_dir_shared": Measure("--output-dir is shared with rank 0", heading="output"),
        "data_dir": Measure("content of --data-dir", equal=True),
        "storage_read_gbs": Measure("storage read past the page cache", "GB/s", "storage", "higher", 50.0, digits=2),
        "node_all_reduce_64mb_gbs": Measure("all-reduce of 64 MB in the node", "GB/s", "AR 64M", "higher"),
        "node_all_reduce_1gb_gbs": Measure("all-reduce of 1 GB in the node", "GB/s", "AR 1G", "higher"),
        "node_all_gather_1gb_gbs": Measure("all-gather of 1 GB in the node", "GB/s", "AG 1G", "higher"),
        "node_reduce_scatter_1gb_gbs": Measure(
            "reduce-scatter of 1 GB in the node", "GB/s", "RS 1G", "higher", digits=1
        ),
        "node_all_reduce_32kb_us": Measure("all-reduce of 32 KB in the node", "µs", "AR 32K", "lower", 50.0, digits=1),
        "pair_all_reduce_gbs": Measure("all-reduce with a neighbouring node", "GB/s", "pair", "higher", 10.0, digits=1),
    },
    "job": {
        "all_reduce_64mb_gbs": Measure("all-reduce of 64 MB over all ranks", "GB/s", digits=1),
        "all_reduce_1gb_gbs": Measure("all-reduce of 1 GB over all ranks", "GB/s", digits=1),
        "all_gather_1gb_gbs": Measure("all-gather of 1 GB over all ranks", "GB/s", digits=1),
        "reduce_scatter_1gb_gbs": Measure("reduce-scatter of 1 GB over all ranks", "GB/s", digits=1),
        "all_reduce_32kb_us": Measure("all-reduce of 32 KB over all ranks", "µs", digits=1),
    },
}
"""All readings by scope and name. Bandwidths of collectives are bus bandwidths (:mod:`.collectives`)."""


def measure_of(scope: Scope, name: str) -> Measure:
    """Return the measure of a reading; ``name`` may end in ``@`` and a path, which title and heading then include."""
    figure, _, path = name.partition("@")
    measure = MEASURES[scope][figure]
    return replace(measure, title=f"{measure.title} ({path})", heading=path[-16:]) if path else measure


def read(reading: Callable[[], Value], absent: Mapping[type[Exception], str] | None = None) -> Reading:
    """Call ``reading`` and return its result as a reading.

    An exception of a type in ``absent`` gives a missing value with the mapped reason (or the exception's message, if
    that is empty). Any other OSError, RuntimeError or ValueError gives a failed check.
    """
    absent = absent or {}
    try:
        return Reading(reading())
    except tuple(absent) as error:
        why = next(text for kind, text in absent.items() if isinstance(error, kind))
        return Reading(missing=why or first_line(error))
    except (OSError, RuntimeError, ValueError) as error:
        return Reading(failed=first_line(error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters; without a message, its type."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


@contextlib.contextmanager
def failures(readings: Readings, *names: str) -> Iterator[None]:
    """Catch OSError and RuntimeError in the block and record them as failures of the ``names`` without a reading."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        for name in names:
            readings.setdefault(name, Reading(failed=first_line(error)))
