"""The table of ``ncu``: its counters by kernel, and its errors."""

from __future__ import annotations

import os

import pytest

from common.characterise.counters import Counters, base_name, ncu_command, parse_counters, read_counters
from common.characterise.roofline import roofline
from common.config.system import Hardware

HEAD = [
    "ID",
    "Process ID",
    "Kernel Name",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__time_duration.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
]
UNITS = ["", "", "", "byte", "byte", "ns", "%"]


def table(*rows):
    lines = [HEAD, UNITS, *([str(number), "7", *row] for number, row in enumerate(rows))]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected to process 7 (/usr/bin/python)\n{text}\n"


def test_counters_are_sums_over_the_launches_of_a_kernel():
    text = table(
        ("void at::native::copy_kernel<(int)4, float>(int, float *)", "1,000", "3,000", "1,000", "0"),
        ("nvjet_hsh_128x256", "100", "100", "100", "80"),
        ("nvjet_hsh_128x256", "500", "100", "300", "40"),
        ("void at::native::copy_kernel<(int)2, float>(int, float *)", "1,000", "1,000", "2,000", "0"),
        ("without_counters", "n/a", "n/a", "n/a", "n/a"),
    )
    assert parse_counters(text) == {
        "at::native::copy_kernel": Counters(2e9, 0.0),  # 6,000 bytes in 3,000 ns
        "nvjet_hsh_128x256": Counters(2e9, pytest.approx(0.5)),  # 80 of 100 ns and 120 of 300 ns
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM - no permission"),
        ("", "ncu wrote no table"),
        (table(), "ncu counted no kernel"),
        (table(("a", "n/a", "1", "1", "1")), "ncu counted no kernel"),
    ],
)
def test_without_counters_there_is_a_reason(text, message, tmp_path):
    path = tmp_path / "counters.csv"
    path.write_text(text)
    assert read_counters(path) == ({}, f"ncu: {message}")
    assert read_counters(tmp_path / "none.csv") == ({}, "ncu: No such file or directory")


@pytest.mark.parametrize(
    ("kernel", "base"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"),
        ("void at::native::vectorized_elementwise_kernel<4, float>(int)", "at::native::vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::sum<4>(int)", "at::native::unnamed::sum"),
        ("void at::native::<unnamed>::sum<(int)4>(int)", "at::native::unnamed::sum"),
    ],
)
def test_kernels_have_the_same_base_name_in_both_profilers(kernel, base):
    assert base_name(kernel) == base


def test_ncu_runs_the_command_only_if_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ncu_command(tmp_path / "counters.csv") == []
    (tmp_path / "ncu").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "ncu", 0o755)
    words = ncu_command(tmp_path / "counters.csv")
    assert words[0] == str(tmp_path / "ncu")
    assert words[-2:] == ["--log-file", str(tmp_path / "counters.csv")]


def test_counters_place_a_kernel_whose_work_is_unknown():
    machine = Hardware("GPU", 1, 80.0, 1000.0, {"bf16": 100.0})
    breakdown = {"kernels": {"flash<1>": [4.0, 1], "copy": [2.0, 1], "gemm": [1.0, 1]}, "busy_ms": 7.0}
    work = {"kernel": "gemm", "operator": "aten.mm", "launches": 1, "ms": 1.0, "precision": "bf16"}
    operators = [{**work, "bytes": 0.0, "flops": 5e10}]
    measured = {"step_ms": 8.0, "kernels": {"breakdown": breakdown, "operators": operators}}
    counters = {"flash": Counters(2e11, 0.6), "copy": Counters(9e11, 0.0), "gemm": Counters(1e11, 0.4)}
    flash, copy, gemm = roofline(measured, None, machine, counters).positions
    assert (flash.bound_ms, flash.limit, flash.source) == (pytest.approx(2.4), "compute", "counters")
    assert flash.bytes == pytest.approx(8e8)
    assert (copy.bound_ms, copy.limit) == (pytest.approx(1.8), "memory")
    assert (gemm.bound_ms, gemm.source, gemm.counters) == (pytest.approx(0.5), "operator aten.mm", counters["gemm"])
