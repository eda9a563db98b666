"""The table of published results, and which of them belong beside a run."""

import pytest

from common.mlperf.rules import BENCHMARKS, rules_for
from common.report.published_results import nearest, published_for, same_task


def test_every_entry_is_of_a_benchmark_and_round_that_the_rules_know():
    results = [result for name in BENCHMARKS for result in published_for(rules_for(name))]
    assert len(results) > 60
    assert all(result.minutes > 0 and result.chips > 0 for result in results)


def test_names_of_other_rounds_are_found():
    names = {result.ruleset for result in published_for(rules_for("rgat", "5.0.0"))}
    assert names == {"4.0.0", "4.1.0", "5.0.0", "5.1.0"}  # called gnn up to v4.1


def test_rounds_that_count_in_other_units_are_left_out():
    assert "3.1.0" not in {result.ruleset for result in published_for(rules_for("stable_diffusion", "4.1.0"))}


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "submitter", "chips", "minutes"),
    [
        ("resnet", "4.0.0", "NVIDIA", 8, 12.0776),
        ("bert", "4.1.0", "NVIDIA", 3472, 0.1193),
        ("retinanet", "3.1.0", "NVIDIA", 2048, 0.9193),
        ("flux1", "5.1.0", "NVIDIA", 1152, 12.5135),
        ("flux1", "5.1.0", "Oracle", 16, 173.8),
    ],
)
def test_scores_are_those_of_the_rounds(benchmark, ruleset, submitter, chips, minutes):
    results = published_for(rules_for(benchmark, ruleset))
    assert any(
        (result.ruleset, result.submitter, result.chips, result.minutes) == (ruleset, submitter, chips, minutes)
        for result in results
    )


def test_the_nearest_results_are_those_of_similar_size():
    results = nearest(published_for(rules_for("bert", "5.0.0")), chips=8, count=4)
    assert {result.chips for result in results} == {8}


def test_one_benchmark_with_other_targets_is_another_task():
    assert not same_task(rules_for("bert", "0.7.0"), rules_for("bert", "1.0.0"))
    assert same_task(rules_for("resnet", "1.0.0"), rules_for("resnet", "4.0.0"))
