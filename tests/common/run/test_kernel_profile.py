"""Breakdown of synthetic kernels."""

import pytest

from common.run.kernel_profile import Breakdown, KernelSpan, breakdown


def test_two_iterations_are_broken_down():
    kernels = [
        KernelSpan("gemm_a", 0.0, 1000.0),
        KernelSpan("ncclDevKernel_AllReduce", 500.0, 2500.0),  # 500 us of it beside the first product
        KernelSpan("gemm_a", 1000.0, 2000.0),
        KernelSpan("transducer_ways_kernel", 3000.0, 3500.0),
        KernelSpan("unknown_kernel", 3500.0, 3600.0),
    ]
    found = breakdown(kernels, 2)
    assert found.kinds == pytest.approx(
        {"matrix product": 1.0, "communication": 1.0, "transducer loss": 0.25, "other": 0.05}
    )
    assert found.kernels["gemm_a"] == pytest.approx((1.0, 1))
    assert found.exposed_ms == pytest.approx(0.25)
    assert found.busy_ms == pytest.approx((2500 + 600) / 1e3 / 2)
    assert (found.compute_ms, found.communication_ms) == pytest.approx((2600 / 1e3 / 2, 1.0))


def test_communication_at_the_same_time_counts_once():
    kernels = [
        KernelSpan("ncclDevKernel_AllGather", 0.0, 300.0),
        KernelSpan("Memcpy PtoP (Device -> Device)", 100.0, 400.0),
    ]
    assert breakdown([*kernels, KernelSpan("Memcpy DtoD (Device -> Device)", 350.0, 600.0)], 1).communication_ms == 0.4


def test_rows_are_sorted_by_time():
    found = Breakdown({"attention": 2.0, "communication": 1.0}, {"flash": (2.0, 3), "nccl": (1.0, 1)}, 0.5, 2.5)
    assert [row.split("  ")[1] for row in found.rows(**{"no kernel (gaps)": 1.5})] == [
        "communication beside nothing", "attention", "no kernel (gaps)", "communication", "longest kernels", "", "",
    ]  # fmt: skip
    assert found.rows()[-2].split() == ["2.000", "ms", "in", "3", "flash"]


def test_one_rank_has_no_row_for_communication():
    assert not [row for row in Breakdown({"attention": 2.0}, {}, 0.0, 2.0).rows() if "communication" in row]


@pytest.mark.parametrize(
    ("communication", "others", "exposed", "busy"),
    [
        ([], [], 0, 0),
        ([], [(0, 5)], 0, 5),
        ([(0, 5)], [], 5, 5),
        ([(0, 5)], [(2, 3)], 4, 5),
        ([(0, 5), (8, 12)], [(3, 9)], 6, 12),
        ([(0, 5), (1, 4), (5, 7)], [], 7, 7),
        ([(4, 6)], [(0, 2), (1, 6)], 0, 6),
        ([(6, 8)], [(0, 2)], 2, 4),
    ],
    ids=str,
)
def test_communication_is_exposed_while_no_other_kernel_runs(communication, others, exposed, busy):
    kernels = [KernelSpan("nccl", 1e3 * start, 1e3 * end) for start, end in communication]
    found = breakdown([*kernels, *(KernelSpan("gemm", 1e3 * start, 1e3 * end) for start, end in others)], 1)
    assert (found.exposed_ms, found.busy_ms) == (exposed, busy)
