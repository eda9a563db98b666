"""Schedules against the tables and formulas of the ResNet rules, in Python floats."""

import pytest
import torch

from common.optim.schedules import ScheduleSteps, constant, nvidia_steps, polynomial, reference_steps

TRAIN_SAMPLES = 1_281_167


def at(schedule, step: int) -> float:
    rate = schedule(torch.tensor(step))
    assert rate.dtype == torch.float32
    assert rate.shape == ()
    return rate.item()


def test_reference_steps_of_batch_1632():
    # reference convergence point: 27,476 decay steps = T - W + 1 with 785 steps per epoch, 2 and 37 epochs
    steps = reference_steps(TRAIN_SAMPLES, 1632, 35, 2, evaluation_offset=1)
    assert steps == ScheduleSteps(785, 2 * 785, 37 * 785)
    assert steps.total_steps - steps.warmup_steps + 1 == 27476


@pytest.mark.parametrize(("epochs", "offset", "rounded"), [(37, 1, 37), (36, 0, 36), (37, 0, 40), (37, 2, 38)])
def test_reference_epochs_end_on_an_evaluation(epochs, offset, rounded):
    steps = reference_steps(TRAIN_SAMPLES, 1632, epochs, 2, evaluation_offset=offset)
    assert steps.total_steps == rounded * 785


@pytest.mark.parametrize(("micro_batches", "micro_batch"), [(8, 400), (64, 50)])
def test_nvidia_steps_of_batch_3200(micro_batches, micro_batch):
    assert nvidia_steps(TRAIN_SAMPLES, micro_batches, micro_batch, 37, 2) == ScheduleSteps(401, 802, 37 * 401)


def test_reference_schedule_at_its_corners():
    w, t, d = 1570, 29045, 27476
    schedule = polynomial(7.4, 1e-4, 2, w, t, first_step=0)
    assert at(schedule, 0) == 0.0
    assert at(schedule, 785) == pytest.approx(3.7)
    assert at(schedule, w) == pytest.approx(7.4)
    assert at(schedule, w + 1000) == pytest.approx(1e-4 + (7.4 - 1e-4) * (1 - 1000 / d) ** 2)
    assert at(schedule, t) == pytest.approx(1e-4 + (7.4 - 1e-4) / d**2)
    assert at(schedule, t + 1) == pytest.approx(1e-4)
    assert at(schedule, t + 5000) == pytest.approx(1e-4)


def test_nvidia_schedule_at_its_corners():
    w, t = 802, 14837
    d = t - w
    schedule = polynomial(11.0, 1e-4, 2, w, t, first_step=1)
    assert at(schedule, 0) == pytest.approx(11.0 / w)
    assert at(schedule, w - 1) == pytest.approx(11.0)
    assert at(schedule, w + 99) == pytest.approx(1e-4 + (11.0 - 1e-4) * (1 - 100 / d) ** 2)
    assert at(schedule, t - 1) == pytest.approx(1e-4)
    assert at(schedule, t + 999) == pytest.approx(1e-4)  # NVIDIA's own would be back at 0.056


def test_no_warmup_starts_at_the_base():
    assert at(polynomial(2.0, 0.0, 1, 0, 9), 0) == 2.0


def test_constant():
    assert at(constant(0.125), 12345) == 0.125


def test_counter_on_the_device_is_all_it_reads():
    counter = torch.zeros((), dtype=torch.int64)
    schedule = polynomial(4.0, 0.0, 1, 4, 12)
    rates = []
    for _ in range(6):
        rates.append(schedule(counter).item())
        counter += 1
    assert rates == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 4.0 * (1 - 1 / 9)])


@pytest.mark.parametrize(("warmup", "total", "first"), [(11, 10, 0), (10, 10, 1), (-1, 10, 0)])
def test_impossible_warmup_is_refused(warmup, total, first):
    with pytest.raises(ValueError, match="decay"):
        polynomial(1.0, 0.0, 2, warmup, total, first_step=first)
