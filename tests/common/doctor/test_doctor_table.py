"""The report for the terminal: rows, spreads of large clusters, findings, and the verdict in the last line."""

import pytest

from common.doctor.findings import Finding, MeasuredUnit
from common.doctor.findings_table import format_report
from common.doctor.reading import Reading


def gpus(count, **values):
    return [
        MeasuredUnit("gpu", f"n{i} GPU 0", {name: Reading(value + i) for name, value in values.items()})
        for i in range(count)
    ]


def lines(units, findings=()):
    return format_report(units, findings, "title").splitlines()


def test_each_gpu_has_a_row_with_units_above():
    printed = lines(gpus(2, matrix_bf16_tflops=700.0, memory_copy_gbs=4000.0))
    assert [line.split() for line in printed[2:6]] == [
        ["GPU", "bf16", "memory"],
        ["TFLOP/s", "GB/s"],
        ["n0", "GPU", "0", "700", "4,000"],
        ["n1", "GPU", "0", "701", "4,001"],
    ]


def test_columns_are_aligned():
    printed = lines(gpus(2, matrix_bf16_tflops=9.0, memory_copy_gbs=99999.0))
    assert len({len(line) for line in printed[2:6]}) == 1


def test_figures_without_a_heading_are_not_in_the_table():
    assert "700" not in "\n".join(lines(gpus(1, matrix_bf16_tflops=1.0, power_limit_w=700.0)))


def test_a_missing_figure_is_a_dash_and_a_failed_one_the_word_failed():
    units = [
        MeasuredUnit("gpu", "a", {"matrix_bf16_tflops": Reading(700.0)}),
        MeasuredUnit("gpu", "b", {"matrix_bf16_tflops": Reading(missing="no")}),
        MeasuredUnit("gpu", "c", {"matrix_bf16_tflops": Reading(failed="CUDA error")}),
    ]
    assert [line.split()[-1] for line in lines(units)[4:7]] == ["700", "-", "failed"]


def test_many_units_become_a_spread_and_the_rows_that_are_named():
    units = gpus(101, matrix_bf16_tflops=600.0)
    finding = Finding("outlier", "n7 GPU 0", "matrix_bf16_tflops", "n7 GPU 0: slow", True)
    printed = lines(units, [finding])
    assert [line.split() for line in printed[4:8]] == [
        ["lowest", "600"],
        ["median", "650"],
        ["highest", "700"],
        ["n7", "GPU", "0", "607"],
    ]
    assert printed[8] == ""


def test_an_empty_job_is_a_verdict_alone():
    assert lines([]) == ["title", "", "FIT: 0 values read, 0 not available, 0 failed"]


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], "FIT: 1 value read, 1 not available, 1 failed"),
        ([("note", False)], "FIT: 1 value read, 1 not available, 1 failed"),
        ([("bad", True)], "UNFIT: 1 finding; 1 value read, 1 not available, 1 failed"),
        ([("bad", True), ("worse", True)], "UNFIT: 2 findings; 1 value read, 1 not available, 1 failed"),
    ],
)
def test_the_last_line_is_the_verdict(findings, verdict):
    readings = {
        "open_files": Reading(1024.0),
        "cpu_governor": Reading(missing="none here"),
        "storage_read_gbs": Reading(failed="broken"),
    }
    printed = lines(
        [MeasuredUnit("node", "n1", readings)], [Finding("state", "n1", "", text, bad) for text, bad in findings]
    )
    assert printed[-1] == verdict
    assert [f"  {text}" in printed for text, _ in findings] == [True] * len(findings)


def test_figures_of_the_job_are_listed():
    printed = lines([MeasuredUnit("job", "all ranks", {"all_reduce_64mb_gbs": Reading(345.678)})])
    assert "  all-reduce of 64 MB over all ranks: 345.7 GB/s" in printed
