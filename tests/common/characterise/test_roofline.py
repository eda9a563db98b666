"""Rooflines of synthetic steps against sums computed by hand."""

from __future__ import annotations

import pytest

from common.characterise.roofline import roofline, shortest
from common.config.system import Hardware

# 1,000 GB/s are 1e9 bytes in a millisecond; 100 TFLOP/s are 1e11 FLOPs in a millisecond.
MACHINE = Hardware("GPU", 1, 80.0, 1000.0, {"bf16": 100.0, "fp8": 200.0})


def row(kernel, ms, launches=1, moved=0.0, flops=0.0, precision="bf16", operator="aten.mm"):
    return {
        "kernel": kernel,
        "operator": operator,
        "launches": launches,
        "ms": ms,
        "bytes": moved,
        "flops": flops,
        "precision": precision,
    }


def case(kernels, moved, flops=0.0, failure="", precision="bf16"):
    return {
        "operation": "swish",
        "case": "small",
        "direction": "forward",
        "implementation": "triton",
        "bytes": moved,
        "flops": flops,
        "precision": precision,
        "kernels": kernels,
        "failure": failure,
    }


def report(kernels, step_ms=10.0, **work):
    breakdown = {"kernels": kernels, "busy_ms": sum(ms for ms, _ in kernels.values())}
    return {"step_ms": step_ms, "kernels": {"breakdown": breakdown, **work}}


def test_the_slower_of_memory_and_compute_limits_a_kernel():
    ms, limit = shortest(2e9, 1e11, "bf16", MACHINE)
    assert (ms, limit) == (pytest.approx(2.0), "memory")
    ms, limit = shortest(2e9, 3e11, "bf16", MACHINE)
    assert (ms, limit) == (pytest.approx(3.0), "compute")
    ms, limit = shortest(2e9, 8e11, "fp8", MACHINE)
    assert (ms, limit) == (pytest.approx(4.0), "compute")


def test_a_format_without_a_known_rate_has_no_limit_for_products_but_one_for_memory():
    assert shortest(2e9, 1e11, "fp32", MACHINE) is None
    assert shortest(2e9, 0.0, "fp32", MACHINE) == (pytest.approx(2.0), "memory")
    assert shortest(2e9, 0.0, "fp32", None) is None


def test_the_share_of_a_step_is_the_sum_of_its_kernels_limits():
    measured = report({"gemm_a": [4.0, 2], "copy_b": [2.0, 1], "ncclDevKernel": [1.0, 1], "mystery": [1.0, 1]})
    eager = report(
        {},
        operators=[
            row("gemm_a", 3.0, launches=1, moved=1e9, flops=3e11),  # 3 ms, compute
            row("gemm_a", 1.0, launches=1, moved=0.5e9, flops=1e10),  # 0.5 ms, memory
            row("copy_b", 2.2, moved=1.5e9, operator="aten.copy_"),  # 1.5 ms
            row("ncclDevKernel", 1.0, moved=9e9),  # communication has no limit
        ],
    )
    found = roofline(measured, eager, MACHINE)
    assert [each.kernel for each in found.positions] == ["gemm_a", "copy_b", "ncclDevKernel", "mystery"]
    gemm, copy, communication, mystery = found.positions
    assert gemm.bound_ms == pytest.approx(3.5)
    assert (gemm.limit, gemm.source, gemm.bytes, gemm.flops) == ("compute", "operator aten.mm", 1.5e9, 3.1e11)
    assert gemm.share == pytest.approx(0.875)
    assert copy.bound_ms == pytest.approx(1.5)
    assert communication.bound_ms is None
    assert (mystery.bound_ms, mystery.source, mystery.share) == (None, "", None)
    assert found.bound_ms == pytest.approx(5.0)
    assert found.share == pytest.approx(0.5)
    assert found.known == pytest.approx(6 / 7)  # of 7 ms without communication
    assert found.tensor_cores == pytest.approx(4 / 7)
    assert found.products_known == pytest.approx(6 / 7)


def test_a_kernel_with_data_from_a_cache_adds_at_most_its_time_to_the_share():
    measured = report({"cached": [1.0, 1], "slow": [3.0, 1]})
    eager = report({}, operators=[row("cached", 1.0, moved=5e9), row("slow", 3.0, moved=1e9)])  # 5 ms and 1 ms
    found = roofline(measured, eager, MACHINE)
    assert found.positions[1].share == pytest.approx(5.0)
    assert found.share == pytest.approx(2.0 / found.step_ms)


def test_work_is_scaled_to_the_launches_of_the_measured_step():
    measured = report({"gemm_a": [4.0, 6]})
    eager = report({}, operators=[row("gemm_a", 1.0, launches=2, moved=1e9)])
    (position,) = roofline(measured, eager, MACHINE).positions
    assert (position.bytes, position.bound_ms) == (pytest.approx(3e9), pytest.approx(3.0))


def test_a_kernel_of_a_case_keeps_the_share_that_it_has_there():
    measured = report({"swish_kernel": [8.0, 4], "other_kernel": [1.0, 1]})
    cases = [
        case({"swish_kernel": 1.5, "other_kernel": 0.5}, moved=1e9),  # 1 ms of 2: half
        case({"swish_kernel": 4.0}, moved=1e9),  # a quarter
        case({"swish_kernel": 9.0}, moved=9e9, failure="out of memory"),
    ]
    swish, other = roofline(measured, report({}, operators=[], cases=cases), MACHINE).positions
    assert swish.bound_ms == pytest.approx(8.0 * (0.75 + 1.0) / 5.5)
    assert (swish.bytes, swish.limit, swish.products) == (None, "memory", False)
    assert swish.source == "case swish, small, forward"
    assert other.bound_ms == pytest.approx(0.5)


def test_a_kernel_whose_rate_is_unknown_is_not_counted():
    measured = report({"gemm_a": [4.0, 1], "copy_b": [1.0, 1]})
    eager = report(
        {}, operators=[row("gemm_a", 4.0, moved=1e9, flops=1e11, precision="tf32"), row("copy_b", 1.0, 1, 1e9)]
    )
    found = roofline(measured, eager, MACHINE)
    assert found.positions[0].bound_ms is None
    assert found.bound_ms == pytest.approx(1.0)
    assert found.known == pytest.approx(0.2)
    assert found.tensor_cores == pytest.approx(0.8)  # tensor cores multiply TF32


def test_the_mix_of_a_step_is_by_kind_and_of_a_cpu_by_operator():
    gpu = roofline(report({"sm90_gemm": [3.0, 1], "nvjet": [3.0, 1], "Memcpy DtoD": [2.0, 1]}), None, None)
    assert gpu.mix == {"matrix product": pytest.approx(0.75), "copy and fill": pytest.approx(0.25)}
    assert gpu.known == 0.0
    work = [row("aten.mm", 6.0, 2), row("aten.mm", 2.0), row("aten.add", 2.0)]
    cpu = roofline({"step_ms": 12.0, "kernels": {"breakdown": None, "operators": work}}, None, None)
    assert cpu.mix == {"aten.mm": pytest.approx(0.8), "aten.add": pytest.approx(0.2)}
    assert (cpu.positions[0].launches, cpu.positions[0].ms, cpu.busy_ms) == (3, 8.0, 10.0)
