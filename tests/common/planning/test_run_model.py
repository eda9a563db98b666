"""Time of a whole run from steps and evaluations, and the measurement that reduces its uncertainty most."""

import dataclasses

import pytest

from common.cli import load
from common.config.composition import compose
from common.doctor.limits import hardware_of
from common.mlperf.admission import evaluation_schedule
from common.planning.compute import ComputeCurve
from common.planning.estimates import Convergence, RunLayout, StepTimes
from common.planning.run_model import EvaluationCost, best_measurement, estimate_run, evaluation_cost, evaluations_until

HARDWARE = hardware_of("h200")


def run_of_four_evaluations(seconds, measured=False, deviation=0.0):
    """Return the estimate of 40 s of training with 4 evaluations; on one of two GPUs, each takes ``seconds``."""
    run = load(compose(["benchmark=resnet", "scale=1xH200", "device=cpu"]))[0]
    schedule = evaluation_schedule(run)
    samples = 4 * next(iter(schedule.blocks(run.train_samples, run.global_batch))).samples
    while evaluations_until(schedule, samples, run.train_samples, run.global_batch) < 4:
        samples += run.global_batch
    convergence = Convergence(run.global_batch, samples, 0.0, "exact")
    layout = RunLayout(2, run.global_batch, run.micro_batch, 1, evaluation_ranks=1)
    step = StepTimes(40 * run.global_batch / samples)
    cost = EvaluationCost(seconds / run.benchmark.eval_samples, measured, False)
    return estimate_run(run, layout, convergence, step, deviation, schedule, cost, HARDWARE, 1.0)


def test_training_does_not_wait_after_the_last_evaluation():
    found = run_of_four_evaluations(15.0)
    assert found.evaluations == pytest.approx(4, rel=0.01)
    # 10 s, then 3 times 15 s from one start of an evaluation to the next, then 15 s for the last one.
    assert found.seconds == pytest.approx(70, rel=0.01)


def test_an_evaluation_of_frozen_weights_takes_half_of_a_micro_batch():
    """With LoRA, the backward pass has no products for the gradients of weights; other networks have them."""
    curve = ComputeCurve((1,), (6.0,))
    for benchmark, seconds in (("llama2_70b_lora", 3.0), ("llama31_8b", 2.0)):
        run = load(compose([f"benchmark={benchmark}", "scale=1xH200", "device=cpu"]))[0]
        assert evaluation_cost(run, curve, 1, None, False).sample == pytest.approx(seconds)


def test_the_measurement_with_the_largest_reduction_is_named():
    found = run_of_four_evaluations(15.0, deviation=0.05)
    assert best_measurement(found, "1xH200")[0] == "evaluation"
    known = {"convergence": 0.3, "network": 0.2, "computation": 0.0985, "evaluation": 0.1}
    # A measured evaluation keeps a fifth of its deviation, a measured computation nothing.
    assert best_measurement(dataclasses.replace(found, uncertainty=known), "1xH200")[0] == "computation"
    assert best_measurement(dataclasses.replace(found, uncertainty={"network": 0.2}), "1xH200") is None


def test_a_measured_evaluation_needs_no_further_measurement():
    found = run_of_four_evaluations(15.0, measured=True)
    assert set(found.uncertainty) >= {"measured evaluation"}
    assert best_measurement(found, "1xH200")[0] == "input"
