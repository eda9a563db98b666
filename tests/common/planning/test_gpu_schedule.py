"""Schedules of trainings on the GPUs of a node."""

import itertools
import random

import pytest

from common.planning.gpu_schedule import in_turn, listed, longest_first, one_gpu_each, optimal

OBJECTIVES = ("makespan", "mean")


def curves_of(seed, jobs, widths=(1, 2, 4)):
    draw = random.Random(seed)
    found = {}
    for job in range(jobs):
        alone, exponent = draw.uniform(1, 10), draw.uniform(0.4, 1)
        found[f"job{job}"] = {width: alone / width**exponent for width in widths}
    return found


def best_of_all_lists(curves, gpus, objective):
    """Return the smallest objective over all orders of the jobs and all numbers of GPUs."""
    choices = [[(name, width) for width in curve if width <= gpus] for name, curve in curves.items()]
    return min(
        listed(order, curves, gpus).value(objective)
        for chosen in itertools.product(*choices)
        for order in itertools.permutations(chosen)
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("seed", "jobs", "gpus"), [(s, 3 + s % 2, 2 + s % 4) for s in range(12)])
def test_no_list_of_the_jobs_is_better_than_the_optimal_schedule(seed, jobs, gpus, objective):
    curves = curves_of(seed, jobs)
    expected = best_of_all_lists(curves, gpus, objective)
    assert optimal(curves, gpus, objective).value(objective) == pytest.approx(expected, rel=1e-9)


def test_jobs_that_scale_badly_run_side_by_side_and_a_job_that_scales_well_gets_all_gpus():
    flat, steep = {1: 4.0, 2: 3.9}, {1: 3.0, 2: 1.5}
    found = optimal({"a": flat, "b": flat, "c": steep}, 2, "makespan")
    assert found.makespan == 5.5
    assert {job.name: len(job.gpus) for job in found.jobs} == {"a": 1, "b": 1, "c": 2}
    assert optimal({"a": flat, "b": flat, "c": steep}, 2, "mean").jobs[0].name == "c"


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("find", [optimal, longest_first])
def test_every_job_runs_once_and_no_gpu_has_two_jobs_at_a_time(find, objective):
    curves = curves_of(5, 7, (1, 2, 4, 8))
    found = find(curves, 8, objective)
    assert sorted(job.name for job in found.jobs) == sorted(curves)
    for job in found.jobs:
        assert job.end - job.start == pytest.approx(curves[job.name][len(job.gpus)])
    for one, other in itertools.combinations(found.jobs, 2):
        assert not set(one.gpus) & set(other.gpus) or one.end <= other.start or other.end <= one.start
    assert optimal(curves, 8, objective).value(objective) <= found.value(objective)


@pytest.mark.parametrize("gpus", [2, 3, 5])
def test_longest_first_keeps_grahams_bound(gpus):
    draw = random.Random(gpus)
    cuts = [sorted(draw.uniform(0, 1) for _ in range(4)) for _ in range(gpus)]  # every GPU is busy from 0 to 1
    pieces = [end - start for cut in cuts for start, end in itertools.pairwise([0.0, *cut, 1.0])]
    curves = {f"job{number}": {1: seconds} for number, seconds in enumerate(pieces)}
    assert 1.0 <= longest_first(curves, gpus, "makespan").makespan * (1 + 1e-12) <= 4 / 3 - 1 / (3 * gpus) + 1e-9


def test_simple_schedules_use_all_gpus_in_turn_or_one_gpu_each():
    curves = {"long": {1: 8.0, 2: 5.0}, "short": {1: 2.0, 2: 1.5}}
    turn = in_turn(curves, 2)
    assert [(job.name, job.gpus, job.end) for job in turn.jobs] == [("short", (0, 1), 1.5), ("long", (0, 1), 6.5)]
    assert (turn.makespan, turn.mean) == (6.5, 4.0)
    each = one_gpu_each(curves, 2, "makespan")
    assert each is not None
    assert sorted((job.name, len(job.gpus), job.end) for job in each.jobs) == [("long", 1, 8.0), ("short", 1, 2.0)]
    assert one_gpu_each({"large": {2: 1.0}}, 2, "makespan") is None


def test_more_gpus_than_pay_are_not_used():
    assert optimal({"a": {1: 2.0, 2: 2.5}}, 2, "makespan").jobs[0].gpus == (0,)


def test_problems_that_are_too_large_or_have_no_schedule_are_refused():
    with pytest.raises(ValueError, match="at most 10 jobs and 8 GPUs"):
        optimal(curves_of(0, 11), 8, "makespan")
    with pytest.raises(ValueError, match="a needs 4 GPUs; there are 2"):
        optimal({"a": {4: 1.0}}, 2, "makespan")
