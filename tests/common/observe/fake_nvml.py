"""A fake NVML: an object with the functions of ``pynvml`` that the suite calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One GPU; ``refused`` names functions that it does not support."""

    bus_id: str
    uuid: str
    name: str = "NVIDIA H200"
    power_mw: int = 412_500
    sm_clock: int = 1830
    energy_mj: int = 5_000
    refused: set[str] = field(default_factory=set)
    answers: dict[str, Any] = field(default_factory=dict)


class FakeNvml:
    """The functions of ``pynvml`` over fake GPUs, which are their own handles.

    Functions that are not defined here return the GPU's ``answers``, by name, or are not supported.
    """

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(gpu: FakeGpu, *arguments: Any) -> Any:
            self._support(gpu, name)
            if name not in gpu.answers:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            given = gpu.answers[name]
            return given(*arguments) if callable(given) else given

        return answer

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        for gpu in self.gpus:
            if uuid in (gpu.uuid, f"MIG-of-{gpu.uuid}"):
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu:  # noqa: N802
        return gpu

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetPciInfo")
        return SimpleNamespace(busId=gpu.bus_id.encode())

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetUUID")
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetName")
        return gpu.name

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetPowerUsage")
        return gpu.power_mw

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetClockInfo")
        return {pynvml.NVML_CLOCK_SM: gpu.sm_clock, pynvml.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetTemperature")
        return 61

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._support(gpu, "nvmlDeviceGetTotalEnergyConsumption")
        return gpu.energy_mj

    def _support(self, gpu: FakeGpu, name: str) -> None:
        if name in gpu.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
