"""Samples until the target is reached, against the RCP checker and against RCPs that were left out."""

from __future__ import annotations

import statistics

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from common.config.yaml_files import CONFIGS, read_small_yaml
from common.errors import ConfigError
from common.mlperf.checker_process import one_checker_process
from common.mlperf.rcp import has_rcps, reference_at
from common.mlperf.rules import newest_ruleset, rules_for
from common.planning.convergence import Convergence


def convergence_of(name: str, ruleset: str | None = None) -> Convergence:
    benchmark = read_small_yaml(CONFIGS / "benchmark" / f"{name}.yaml", "the benchmark")
    return Convergence.from_rcps(name, benchmark["train_samples"], ruleset)


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "batch", "samples"),
    [
        ("resnet", "4.0.0", 3264, 1_281_167),
        ("resnet", "4.0.0", 40_000, 1_281_167),
        ("bert", "5.0.0", 5000, 1),
        ("gpt3", "4.0.0", 2048, 1 / 2048),
        ("gpt3", "4.0.0", 2304, 1 / 2048),
        ("rgat", "5.1.0", 100_000, 94_605_581),
        ("llama2_70b_lora", "6.1.0", 64, 1),
        ("unet3d", "3.1.0", 82, 1),
    ],
)
def test_the_interpolation_is_the_checkers_in_samples(benchmark, ruleset, batch, samples):
    reference = reference_at(rules_for(benchmark, ruleset), batch)
    assert convergence_of(benchmark, ruleset).at(batch).mean == pytest.approx(reference.mean * samples, rel=1e-9)


def test_steps_become_samples_before_the_pruning():
    """In steps, the largest batch converges fastest, and the checker drops all smaller ones."""
    checker = rcp_checker.RCP_Checker("training", "3.1.0", "stable_diffusion", False)
    assert [record["BS"] for record in checker.pruned_rcp_data.values()] == [2048]
    found = convergence_of("stable_diffusion", "3.1.0")
    assert found.batches == (512, 1024, 2048)
    assert found.at(512).mean == 5000 * 512


def test_a_damaged_count_does_not_widen_the_spread():
    """One run of GPT-3 at 3,072 has ten times the tokens of the others; the checker's deviation is 3.6 means."""
    point = convergence_of("gpt3", "4.1.0").at(3072)
    assert point.stdev < 0.05 * point.mean


@pytest.mark.parametrize("batch", [1631, 67_841])
def test_a_batch_outside_the_reference_points_is_one_clear_error(batch):
    with pytest.raises(ConfigError, match=rf"^resnet: global batch {batch} is outside the RCPs .* from 1632 to 67840"):
        convergence_of("resnet").at(batch)


def test_a_benchmark_without_reference_points_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"^dlrm: mlperf-logging has no RCPs for v2\.1"):
        convergence_of("dlrm")


def test_reference_points_left_out_are_predicted():
    """Interpolation between the neighbours of an RCP, against the RCP itself, for all benchmarks together."""
    errors = []
    names = [path.stem for path in sorted((CONFIGS / "benchmark").glob("*.yaml"))]
    with one_checker_process():
        for name in names:
            if has_rcps(name, newest_ruleset(name)):
                known = convergence_of(name)
                for batch in known.batches[1:-1]:
                    errors.append(abs(known.without(batch).at(batch).mean / known.at(batch).mean - 1))
    assert len(errors) >= 20
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.25
