"""Samples until the target is reached, against the RCP checker and against RCPs that were left out."""

from __future__ import annotations

import statistics

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from common.config.yaml_files import CONFIGS
from common.errors import ConfigError
from common.mlperf.checker_process import one_checker_process
from common.mlperf.rules import rules_for
from common.planning.convergence import batches_of, convergence_at, curve_of, interpolated, interpolation_error


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "batch", "samples"),
    [
        ("resnet", "4.0.0", 3264, 1_281_167),
        ("resnet", "4.0.0", 40_000, 1_281_167),
        ("bert", "5.0.0", 256, 1),
        ("bert", "5.0.0", 5000, 1),
        ("gpt3", "4.0.0", 2304, 1 / 2048),
        ("rgat", "5.1.0", 65_536, 94_605_581),
        ("gnn", "4.1.0", 100_000, 94_605_581),
        ("llama2_70b_lora", "6.1.0", 64, 1),
        ("unet3d", "3.1.0", 82, 1),
        ("cosmoflow", "3.0.0", 128, 524_288),
    ],
)
def test_convergence_is_the_checkers_before_its_pruning(benchmark, ruleset, batch, samples):
    rules = rules_for(benchmark, ruleset)
    checker = rcp_checker.RCP_Checker(rules.usage, ruleset, benchmark, False)
    record, found = checker._find_rcp(batch, "full_rcps"), "exact"
    if record is None:
        low, high = checker._find_top_min_rcp(batch, "full_rcps"), checker._find_bottom_max_rcp(batch, "full_rcps")
        record, found = checker._create_interp_rcp(batch, low, high)[1], "interpolated"
    convergence = convergence_at(benchmark, batch, ruleset)
    assert convergence.samples == pytest.approx(record["RCP Mean"] * samples, rel=1e-9)
    assert convergence.found == found
    assert batch in batches_of(benchmark, ruleset) or found == "interpolated"


def test_steps_become_samples():
    assert batches_of("stable_diffusion", "3.1.0") == (512, 1024, 2048)
    assert convergence_at("stable_diffusion", 512, "3.1.0").samples == 5000 * 512


def test_a_damaged_count_does_not_widen_the_spread():
    """One run of GPT-3 at 3,072 has ten times the tokens of the others; the checker's deviation is 3.6 means."""
    assert convergence_at("gpt3", 3072, "4.1.0").spread < 0.05


@pytest.mark.parametrize("batch", [1631, 67_841])
def test_a_batch_outside_the_reference_points_is_one_clear_error(batch):
    with pytest.raises(
        ConfigError, match=rf"^global batch {batch} is outside the RCPs of resnet in v4\.0 \(1632, 3264, "
    ):
        convergence_at("resnet", batch)


def test_a_benchmark_without_reference_points_is_one_clear_error():
    assert batches_of("dlrm") == ()
    with pytest.raises(ConfigError, match=r"^there are no RCPs of dlrm in v2\.1: "):
        convergence_at("dlrm", 65_536)


def test_reference_points_left_out_are_predicted():
    """Interpolation between the neighbours of an RCP, against the RCP itself, for all benchmarks together."""
    errors, deviations = [], []
    with one_checker_process():
        for path in sorted((CONFIGS / "benchmark").glob("*.yaml")):
            curve = curve_of(path.stem)
            for left_out in curve[1:-1]:
                others = [point for point in curve if point is not left_out]
                errors.append(abs(interpolated(others, left_out.batch).mean / left_out.mean - 1))
                deviations.append(errors[-1] / interpolation_error(others, left_out.batch))
    assert len(errors) >= 50
    assert statistics.median(errors) < 0.04
    assert max(errors) < 0.4
    inside = sum(each < 1.645 for each in deviations) / len(deviations)
    assert 0.85 < inside < 0.95


def test_the_error_of_an_interpolation_grows_with_the_distance_to_the_neighbours():
    low, _, *_, high = curve = curve_of("resnet", "4.0.0")
    middle = round((low.batch * high.batch) ** 0.5)
    assert interpolation_error(curve, low.batch) == 0.0
    assert 0.0 < interpolation_error(curve, low.batch + 16) < interpolation_error(curve, middle)
    assert interpolation_error(curve, middle) < interpolation_error([low, high], middle)
    assert convergence_at("resnet", low.batch + 16, "4.0.0").interpolation > 0.0
