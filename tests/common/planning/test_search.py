"""The search for layouts: memory limits hold, and better hardware is never slower."""

import dataclasses
import functools

import pytest

from common.cli import load, workload_class
from common.config.system import Link
from common.doctor.limits import hardware_of
from common.planning.convergence import convergence_at
from common.planning.points import RESULTS, read_measurements
from common.planning.search import FixedChoices, LayoutSearch

HARDWARE = hardware_of("h200")


@functools.cache
def points_of(benchmark):
    return read_measurements(sorted(RESULTS.rglob("*.json")), benchmark, HARDWARE.gpu, load).points


def search(benchmark, hardware=HARDWARE, evaluation=None):
    axes = [axis for axis in workload_class(benchmark).axes if axis != "dp"]
    convergence = functools.partial(convergence_at, benchmark)
    return LayoutSearch(
        benchmark, "h200", hardware, points_of(benchmark), axes, load, convergence, evaluation=evaluation
    )


@pytest.mark.parametrize("memory_gb", [100.0, 150.0])
def test_no_plan_needs_more_memory_than_a_gpu_has(memory_gb):
    hardware = dataclasses.replace(HARDWARE, memory_gb=memory_gb)
    plans = search("llama31_8b", hardware).plans(8, 64)
    assert {plan.estimate.layout.tp for plan in plans} > {1}
    for plan in plans:
        assert plan.estimate.memory <= memory_gb * 1e9
        layout = plan.estimate.layout
        assert layout.micro_batch * layout.accumulation * layout.replicas == 64
        assert layout.replicas * layout.pp * layout.cp * layout.tp == layout.training_gpus


def test_the_first_plan_has_the_smallest_upper_limit():
    plans = search("llama31_8b").plans(8, 64)
    limits = [plan.estimate.interval()[1] for plan in plans]
    assert limits == sorted(limits)


def test_faster_links_and_memory_never_slow_the_same_plan():
    fast = dataclasses.replace(HARDWARE, node_link=Link(1.0, 650.0), network_link=Link(4.0, 90.0))
    slow, quick = (
        {plan.estimate.layout: plan.estimate.seconds for plan in search("llama31_8b", hardware).plans(16, 32)}
        for hardware in (HARDWARE, fast)
    )
    assert slow.keys() == quick.keys()
    assert all(quick[layout] <= slow[layout] for layout in slow)


def test_the_measured_batch_of_a_recipe_is_tried():
    """The limit of `micro_batch=auto` is none for plans: R-GAT was measured with 2,048 seeds."""
    sizes = {plan.estimate.layout.micro_batch for plan in search("rgat").plans(8, 16384)}
    assert 2048 in sizes


def test_a_fixed_layout_is_the_only_one():
    plans = search("llama2_70b_lora").plans(8, 8, FixedChoices(micro_batch=1, axes=(1, 2, 1)))
    found = {(plan.estimate.layout.micro_batch, plan.estimate.layout.cp, plan.estimate.layout.tp) for plan in plans}
    assert found == {(1, 2, 1)}


def test_evaluation_ranks_do_not_train():
    plans = search("resnet").plans(64, 3264, FixedChoices(micro_batch=34))
    apart = [plan.estimate for plan in plans if plan.estimate.layout.evaluation_ranks]
    assert apart
    for each in apart:
        assert each.layout.training_gpus == 64 - each.layout.evaluation_ranks
        assert each.evaluation == 0.0
        assert each.last_evaluation > 0.0


def test_a_measured_evaluation_is_the_time_of_a_sample():
    def seconds(sample):
        plans = search("resnet", evaluation=sample).plans(8, 3264, FixedChoices(micro_batch=408))
        return next(plan.estimate.evaluation for plan in plans if not plan.estimate.layout.evaluation_ranks)

    assert seconds(2e-3) - seconds(1e-3) == pytest.approx(6250e-3)  # 50,000 images on 8 GPUs
