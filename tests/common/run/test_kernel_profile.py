"""A breakdown of made-up kernels, by hand."""

from __future__ import annotations

import pytest

from common.run.kernel_profile import Breakdown, Kernel, Span, breakdown, busy_us, exposed_us


def test_two_iterations_are_broken_down() -> None:
    kernels = [
        Kernel("gemm_a", 0.0, 1000.0),
        Kernel("ncclDevKernel_AllReduce", 500.0, 2500.0),  # 500 us beside the first product, 1,000 beside the second
        Kernel("gemm_a", 1000.0, 2000.0),
        Kernel("transducer_ways_kernel", 3000.0, 3500.0),
        Kernel("nobody_knows", 3500.0, 3600.0),
    ]
    found = breakdown(kernels, 2)
    assert found.kinds == pytest.approx(
        {"matrix product": 1.0, "communication": 1.0, "transducer loss": 0.25, "other": 0.05}
    )
    assert found.kernels["gemm_a"] == pytest.approx((1.0, 1))
    assert found.exposed_ms == pytest.approx(0.25)
    assert found.busy_ms == pytest.approx((2500 + 600) / 1e3 / 2)
    assert (found.compute_ms, found.communication_ms) == pytest.approx((2600 / 1e3 / 2, 1.0))


def test_communication_at_the_same_time_counts_once() -> None:
    kernels = [Kernel("ncclDevKernel_AllGather", 0.0, 300.0), Kernel("Memcpy PtoP (Device -> Device)", 100.0, 400.0)]
    assert breakdown([*kernels, Kernel("Memcpy DtoD (Device -> Device)", 350.0, 600.0)], 1).communication_ms == 0.4


def test_rows_are_in_the_order_of_what_they_took() -> None:
    found = Breakdown({"attention": 2.0, "communication": 1.0}, {"flash": (2.0, 3), "nccl": (1.0, 1)}, 0.5, 2.5)
    assert [row.split("  ")[1] for row in found.rows(**{"no kernel (gaps)": 1.5})] == [
        "communication beside nothing", "attention", "no kernel (gaps)", "communication", "longest kernels", "", "",
    ]  # fmt: skip
    assert found.rows()[-2].split() == ["2.000", "ms", "in", "3", "flash"]


def test_one_rank_has_no_row_of_communication() -> None:
    assert not [row for row in Breakdown({"attention": 2.0}, {}, 0.0, 2.0).rows() if "communication" in row]


@pytest.mark.parametrize(
    ("spans", "exposed", "busy"),
    [
        ([], 0, 0),
        ([Span(0, 5, False)], 0, 5),
        ([Span(0, 5, True)], 5, 5),
        ([Span(0, 5, True), Span(2, 3, False)], 4, 5),
        ([Span(0, 5, True), Span(3, 9, False), Span(8, 12, True)], 6, 12),
        ([Span(0, 5, True), Span(1, 4, True), Span(5, 7, True)], 7, 7),
        ([Span(0, 2, False), Span(1, 6, False), Span(4, 6, True)], 0, 6),
        ([Span(6, 8, True), Span(0, 2, False)], 2, 4),
    ],
)
def test_time_in_which_only_communication_ran_and_in_which_anything_did(spans, exposed, busy):
    assert exposed_us(spans) == exposed
    assert busy_us(spans) == busy
