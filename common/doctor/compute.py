"""Measure a GPU under load: matrix products, copies in its memory, and copies to and from the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from common.doctor.reading import Reading, Readings, failures

MATRIX = 8192
"""Rows and columns of the square matrices: 1.1 TFLOP per product, large enough to reach the GPU's full rate."""
COPY_BYTES = 2 << 30
HOST_BYTES = 256 << 20
GB = 1e9


@dataclass(frozen=True)
class Durations:
    """Seconds per measurement.

    Attributes:
        matrix: seconds of the first matrix product, long enough to heat up the GPU.
        short: seconds of every other measurement.
    """

    matrix: float
    short: float


def measure_gpu(
    device: torch.device, durations: Durations, watch: contextlib.AbstractContextManager[object]
) -> Readings:
    """Measure the rates of a GPU, one after the other, starting with the highest load.

    Matrix products of random matrices count 2 n^3 operations. Copies in GPU memory count bytes read and written. Copies
    to and from the host use pinned memory, one direction at a time.

    Args:
        watch: context of the first matrix product, which is the steadiest load.
    """
    readings: Readings = {}
    with failures(readings, "matrix_bf16_tflops", "matrix_repeats"), watch:
        _measure_products(readings, torch.bfloat16, "matrix_bf16_tflops", device, durations.matrix)
    with failures(readings, "matrix_fp16_tflops"):
        _measure_products(readings, torch.float16, "matrix_fp16_tflops", device, durations.short)
    with failures(readings, "matrix_fp8_tflops"):
        readings["matrix_fp8_tflops"] = _fp8_products(device, durations.short)
    with failures(readings, "memory_copy_gbs"):
        size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        rate = 2 * size * _repeat(lambda: target.copy_(source), durations.short, device) / GB
        readings["memory_copy_gbs"] = Reading(rate)
        del source, target
    with failures(readings, "host_to_device_gbs", "device_to_host_gbs"):
        on_host = torch.empty(HOST_BYTES, dtype=torch.uint8).pin_memory()
        on_device = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
        for name, target, source in (
            ("host_to_device_gbs", on_device, on_host),
            ("device_to_host_gbs", on_host, on_device),
        ):
            copies = _repeat(partial(target.copy_, source, non_blocking=True), durations.short, device)
            readings[name] = Reading(HOST_BYTES * copies / GB)
    with contextlib.suppress(RuntimeError):  # the GPU may have failed above
        torch.cuda.empty_cache()
    return readings


def _measure_products(readings: Readings, dtype: torch.dtype, name: str, device: torch.device, seconds: float) -> None:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(MATRIX, MATRIX, device=device, generator=generator).to(dtype) for _ in range(2))
    result = torch.empty(MATRIX, MATRIX, device=device, dtype=dtype)
    torch.mm(a, b, out=result)
    first = result.clone()
    rate = _repeat(lambda: torch.mm(a, b, out=result), seconds, device)
    readings[name] = Reading(2 * MATRIX**3 * rate / 1e12)
    if "matrix_repeats" not in readings:
        # Same kernel, same numbers: if the result differs after the load, the hot GPU computes wrongly.
        readings["matrix_repeats"] = Reading(torch.equal(first, result))


def _fp8_products(device: torch.device, seconds: float) -> Reading:
    if torch.cuda.get_device_capability(device) < (8, 9):
        return Reading(missing="this GPU has no fp8")
    # b.t() is column-major, as the product requires for its second operand.
    a, b = (torch.randn(MATRIX, MATRIX, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    kind = F.ScalingType.TensorWise

    def product() -> Tensor:
        return F.scaled_mm(a, b.t(), scale, kind, scale, kind, output_dtype=torch.bfloat16, use_fast_accum=True)

    return Reading(2 * MATRIX**3 * _repeat(product, seconds, device) / 1e12)


def _repeat(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Return the repetitions of ``work`` per second, over ``seconds`` after a warm-up, with a bounded launch queue."""
    for _ in range(3):
        work()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    once = max(time.perf_counter() - started, 1e-6)
    group = max(1, int(0.05 / once))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repetitions = 0
    started = time.perf_counter()
    begin.record()
    while time.perf_counter() - started < seconds or not repetitions:
        for _ in range(group):
            work()
        repetitions += group
        end.record()
        end.synchronize()
    return repetitions / (begin.elapsed_time(end) / 1000)
