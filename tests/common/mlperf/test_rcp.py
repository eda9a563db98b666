"""Scores and the RCP test against the rules' example and mlperf-logging's own checker."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from handwritten_logs import END, POINT, replaced, resnet_lines
from mlperf_logging.rcp_checker import rcp_checker

from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.rcp import (
    check_convergence,
    convergence_of,
    has_rcps,
    olympic_mean,
    pick_window,
    reference_at,
)
from common.mlperf.rcp_engine import reference_statistics, smallest_acceptable_mean
from common.mlperf.rules import rules_for

WriteLog = Callable[..., Path]
EXAMPLE = [16, 14, 16, 17, 16, 16, 15, 16, 15, 16]


def test_example_of_the_rules_with_the_checkers_deviation():
    mean, stdev = reference_statistics(EXAMPLE)
    assert mean == 15.75
    assert stdev == pytest.approx(0.781, abs=5e-4)
    assert smallest_acceptable_mean(mean, stdev, reference_runs=8, submission_runs=3) == pytest.approx(14.781, abs=5e-4)


def test_example_of_the_rules_as_printed():
    assert smallest_acceptable_mean(15.75, 0.433, reference_runs=8, submission_runs=3) == pytest.approx(
        15.213, abs=5e-4
    )


def test_no_spread_allows_no_speed_up():
    assert smallest_acceptable_mean(15.75, 0.0, 8, 3) == 15.75


@pytest.mark.parametrize(
    ("usage", "ruleset", "benchmark"),
    [
        ("training", "4.0.0", "resnet"),
        ("training", "4.0.0", "unet3d"),
        ("training", "5.0.0", "bert"),
        ("training", "6.0.0", "dlrm_dcnv2"),
        ("training", "6.1.0", "llama2_70b_lora"),
        ("training", "4.1.0", "gpt3"),
        ("hpc", "3.0.0", "cosmoflow"),
    ],
)
def test_limits_are_the_checkers_for_every_reference_point(usage, ruleset, benchmark):
    checker = rcp_checker.RCP_Checker(usage, ruleset, benchmark, False)
    dropped = 4 if benchmark == "unet3d" else 1
    assert checker.rcp_data
    for record in checker.rcp_data.values():
        counts = record["Epochs to converge"]
        mean, stdev = reference_statistics(counts, dropped)
        limit = smallest_acceptable_mean(mean, stdev, len(counts) - 2 * dropped, checker.submission_runs - 2)
        assert mean == pytest.approx(record["RCP Mean"], rel=1e-12)
        assert stdev == pytest.approx(record["RCP Stdev"], rel=1e-9)
        assert limit == pytest.approx(record["Min Epochs"], abs=1e-4)  # the checker bisects to 1e-4


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "batch", "found"),
    [
        ("resnet", "4.0.0", 3264, "exact"),
        ("resnet", "4.0.0", 3200, "interpolated"),
        ("resnet", "4.0.0", 512, "smallest"),
        ("bert", "5.0.0", 3072, "interpolated"),  # its own RCP is pruned
        ("unet3d", "4.0.0", 56, "exact"),
        ("unet3d", "4.0.0", 60, "interpolated"),
        ("llama31_405b", "6.0.0", 1152, "exact"),
        ("llama2_70b_lora", "6.1.0", 8, "exact"),
        ("llama2_70b_lora", "6.1.0", 64, "interpolated"),
    ],
)
def test_reference_at_a_batch_is_the_checkers(benchmark, ruleset, batch, found):
    checker = rcp_checker.RCP_Checker("training", ruleset, benchmark, False)
    record = checker._find_rcp(batch, "pruned_rcps")
    if found == "interpolated":
        low = checker._find_top_min_rcp(batch, "pruned_rcps")
        record = checker._create_interp_rcp(batch, low, checker._find_bottom_max_rcp(batch, "pruned_rcps"))[1]
    elif found == "smallest":
        record = checker._find_min_rcp("pruned_rcps")
    checker._eval_submission_record(record, [1.0] * 50, "")  # applies the checker's tolerances to "Max Speedup"
    reference = reference_at(rules_for(benchmark, ruleset), batch)
    assert reference.found == found
    assert reference.mean == pytest.approx(record["RCP Mean"], rel=1e-12)
    assert reference.limit == pytest.approx(record["RCP Mean"] / record["Max Speedup"], rel=1e-6, abs=1e-3)


def test_batch_beyond_all_references_has_none():
    assert reference_at(rules_for("resnet", "4.0.0"), 100_000) is None
    assert reference_at(rules_for("minigo", "2.1.0"), 512) is None


def test_convergence_is_the_last_evaluation_before_run_stop(write_log):
    rules = rules_for("resnet", "4.0.0")
    assert convergence_of(read_log(write_log(resnet_lines(last_epoch=35))), rules) == 35
    assert convergence_of(read_log(write_log(resnet_lines(accuracies=(0.1, 0.2)))), rules) is None


def test_convergence_of_stable_diffusion_is_its_first_passing_checkpoint(write_log):
    scores = [(512_000, 95.0, 0.2), (1_024_000, 85.0, 0.2), (1_536_000, 80.0, 0.2)]
    lines = [
        *(
            (POINT, "eval_accuracy", value, {"metric": metric, "samples_count": samples}, 1)
            for samples, fid, clip in scores
            for metric, value in (("FID", fid), ("CLIP", clip))
        ),
        (END, "run_stop", None, {"status": "success"}, 2),
    ]
    assert convergence_of(read_log(write_log(lines)), rules_for("stable_diffusion", "5.0.0")) == 1_024_000


def test_olympic_mean_drops_the_ends():
    assert olympic_mean([9.0, 1.0, 2.0, 3.0, 100.0]) == pytest.approx((2 + 3 + 9) / 3)
    assert olympic_mean([*range(10)], dropped=4) == 4.5


def test_failed_run_counts_as_the_slowest():
    assert olympic_mean([math.inf, 1.0, 2.0, 3.0, 4.0]) == 3.0
    assert olympic_mean([math.inf, math.inf, 2.0, 3.0, 4.0]) == math.inf


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0, math.nan, 2.0]])
def test_olympic_mean_of_too_little_or_nan_is_an_error(values):
    with pytest.raises(ValueError, match=r"leave nothing|NaN"):
        olympic_mean(values)


def resnet_set(write_log: WriteLog, epochs: list[int]) -> list[ParsedLog]:
    """Logs at global batch 3264, whose RCP has mean 35.154 and limit 34.31."""
    paths = [write_log(resnet_lines(seed=i, last_epoch=e), f"result_{i}.txt") for i, e in enumerate(epochs)]
    return [read_log(path) for path in paths]


def test_convergence_like_the_references_passes_unscaled(write_log):
    result = check_convergence(resnet_set(write_log, [35, 35, 36, 37, 39]), "resnet", "4.0.0")
    assert (result.passed, result.factor) == (True, 1.0)


def test_faster_convergence_within_chance_scales_the_score(write_log):
    result = check_convergence(resnet_set(write_log, [31, 34, 35, 35, 39]), "resnet", "4.0.0")
    assert result.passed
    counts = json.loads((Path(rcp_checker.__file__).parent / "training_4.0.0" / "rcps_resnet.json").read_text())
    reference = next(r["Epochs to converge"] for r in counts.values() if r["BS"] == 3264)
    mean = sum(sorted(reference)[1:-1]) / (len(reference) - 2)
    assert result.factor == pytest.approx(mean / (104 / 3), rel=1e-9)


def test_convergence_faster_than_chance_fails(write_log):
    result = check_convergence(resnet_set(write_log, [27, 31, 31, 31, 35]), "resnet", "4.0.0")
    assert not result.passed
    assert "faster" in result.message


def test_batch_beyond_all_references_has_no_rcp(write_log):
    lines = [replaced(resnet_lines(seed=i), "global_batch_size", 100_000) for i in range(5)]
    logs = [read_log(write_log(each, f"result_{i}.txt")) for i, each in enumerate(lines)]
    result = check_convergence(logs, "resnet", "4.0.0")
    assert not result.passed
    assert "BS = 100000" in result.message


def test_the_checker_writes_no_file_beside_the_logs(write_log, tmp_path):
    logs = resnet_set(write_log, [31, 34, 35, 35, 39])
    check_convergence(logs, "resnet", "4.0.0")
    assert sorted(tmp_path.iterdir()) == sorted(log.path for log in logs)


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "testable"),
    [("resnet", "4.0.0", True), ("resnet", "0.7.0", False), ("dlrm", "2.1.0", False), ("minigo", "2.1.0", False)],
)
def test_benchmarks_without_an_rcp_test(benchmark, ruleset, testable):
    assert has_rcps(benchmark, ruleset) == testable


def test_convergence_without_rcps_is_not_passed(write_log):
    result = check_convergence(resnet_set(write_log, [35] * 5), "resnet", "0.7.0")
    assert not result.passed
    assert "no RCPs" in result.message


def test_window_is_the_median_of_all_windows():
    # windows of 3 keep their middle run: scores 2, 3, 4, 6, 6 -> median 4 at index 2
    window = pick_window([1.0, 2.0, 3.0, 4.0, 9.0, 6.0, 5.0], runs=3)
    assert (window.start, window.score, window.valid) == (2, 4.0, True)


def test_all_runs_are_the_window_of_a_single_set():
    assert pick_window([3.0, 1.0, 2.0, 5.0, 4.0], runs=5).start == 0


def test_slower_of_two_middle_windows_is_taken():
    window = pick_window([1.0, 2.0, 3.0, 4.0], runs=3)  # scores 2 and 3
    assert (window.start, window.score) == (1, 3.0)


def test_failed_runs_are_infinitely_slow():
    # windows: (None, 1, 2) -> 2, (1, 2, None) -> 2, (2, None, None) -> infinite
    assert pick_window([None, 1.0, 2.0, None, None], runs=3).score == 2.0


def test_invalid_median_window_makes_the_result_invalid():
    window = pick_window([None, None, 2.0, None, None], runs=3)
    assert not window.valid


def test_too_few_runs_for_a_window_is_an_error():
    with pytest.raises(ValueError, match="needs 5 runs"):
        pick_window([1.0] * 4, runs=5)
