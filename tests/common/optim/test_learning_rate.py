"""Test schedules against tables and formulas of rules and references, in Python floats."""

import math

import pytest
import torch

from common.optim.learning_rate import (
    ScheduleSteps,
    constant,
    cosine,
    cosine_of_samples,
    cosine_to,
    held_exponential,
    held_polynomial,
    linear_from_zero,
    nvidia_steps,
    polynomial,
    reference_steps,
    stepwise,
    warmup_then_constant,
)

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


BERT_TABLE = {  # (base, N, W, S): step -> share of the base
    (3.5e-3, 700, 0, 0): {0: 1.0, 1: 699 / 700, 350: 0.5, 699: 1 / 700, 700: 0.0, 5000: 0.0},
    (2.88293e-3, 600, 287, -76): {
        0: 76 / 287, 1: 77 / 287, 210: 286 / 287, 211: 389 / 600, 286: 314 / 600, 287: 313 / 600, 600: 0.0, 601: 0.0
    },
    (2.58e-3, 700, 200330, -200000): {
        0: 200000 / 200330, 1: 200001 / 200330, 329: 200329 / 200330, 330: 370 / 700, 699: 1 / 700, 700: 0.0
    },
    (2e-3, 1141, 100, 0): {0: 0.0, 1: 0.01, 99: 0.99, 100: 1041 / 1141, 1141: 0.0},
    (2.9293e-3, 700, 0, -700): {0: 1.0, 1: 699 / 700, 700: 0.0},
}  # fmt: skip

NVIDIA_BERT_TABLE = {
    (3.5e-3, 700, 0, 0): {0: 1.0, 1: 699 / 700, 700: 0.0},
    (2.88293e-3, 600, 287, -76): {0: 77 / 287, 209: 286 / 287, 210: 389 / 600, 599: 0.0, 600: 0.0},
    (2.58e-3, 700, 200330, -200000): {0: 200001 / 200330, 328: 200329 / 200330, 329: 370 / 700, 699: 0.0},
    (2e-3, 1141, 100, 0): {0: 0.0, 99: 0.99, 100: 1041 / 1141, 1141: 0.0},
    (2.9293e-3, 700, 0, -700): {0: 1.0, 1: 699 / 700, 700: 0.0},
}


@pytest.mark.parametrize("numbers", list(BERT_TABLE), ids=str)
def test_bert_schedule_of_the_reference(numbers):
    schedule = linear_from_zero(*numbers)
    rates = {step: at(schedule, step) / numbers[0] for step in BERT_TABLE[numbers]}
    assert rates == pytest.approx(BERT_TABLE[numbers], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("numbers", list(NVIDIA_BERT_TABLE), ids=str)
def test_bert_schedule_of_nvidia_counts_from_one_with_an_offset(numbers):
    schedule = linear_from_zero(*numbers, first_step_with_offset=1)
    rates = {step: at(schedule, step) / numbers[0] for step in NVIDIA_BERT_TABLE[numbers]}
    assert rates == pytest.approx(NVIDIA_BERT_TABLE[numbers], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("steps", "message"),
    [((0, 0, 0), "training_steps=0"), ((9, -1, 0), "warmup_steps=-1"), ((9, 5, 1), "start_warmup")],
)
def test_impossible_bert_schedule_is_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        linear_from_zero(1.0, *steps)


def test_unet3d_warmup_of_nvidia_at_the_logged_step():
    # 8 x H200, batch 56: 3 steps an epoch, 1000 epochs, 20 untimed iterations; logged after 60 updates: 0.0530775
    schedule = warmup_then_constant(2.0, 1e-4, 3000, offset=20)
    assert at(schedule, 59) == pytest.approx(0.0530775, abs=5e-8)
    assert at(schedule, 0) == pytest.approx(1e-4 + 1.9999 * 21 / 3020)
    assert at(schedule, 2998) == pytest.approx(1e-4 + 1.9999 * 3019 / 3020)
    assert [at(schedule, s) for s in (2999, 3000, 10**9)] == [2.0] * 3


def test_unet3d_warmup_of_the_reference_changes_with_the_epoch():
    # batch 2: 84 steps an epoch, 0.8 after 200 epochs; lr(e) = 1e-4 + 0.7999 * e / 200, the first epoch is 1
    schedule = warmup_then_constant(0.8, 1e-4, 200 * 84, steps_per_update=84)
    rates = {s: at(schedule, s) for s in (0, 83, 84, 199 * 84 - 1, 199 * 84, 200 * 84, 10**6)}
    epochs = {0: 1, 83: 1, 84: 2, 199 * 84 - 1: 199, 199 * 84: 200, 200 * 84: 200, 10**6: 200}
    assert rates == pytest.approx({s: 1e-4 + 0.7999 * epoch / 200 for s, epoch in epochs.items()})


def test_a_warmup_that_counts_from_zero_begins_at_the_initial_rate():
    schedule = warmup_then_constant(1.0, 0.5, 4, first_step=0)
    assert [at(schedule, s) for s in range(6)] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


def test_without_warmup_the_offset_counts_for_nothing():
    assert at(warmup_then_constant(2.0, 1e-4, 0, offset=20), 0) == 2.0


@pytest.mark.parametrize("lengths", [{"warmup_steps": -1}, {"offset": -1}, {"steps_per_update": 0}])
def test_lengths_of_a_warmup_without_sense_are_refused(lengths):
    (named,) = (f"{name}={value}" for name, value in lengths.items())
    with pytest.raises(ValueError, match=named):
        warmup_then_constant(1.0, 0.1, **{"warmup_steps": 5, **lengths})


def test_steps_of_cosmoflow_at_a_batch_of_512():
    # NVIDIA's settings; 1,024 steps an epoch
    schedule = stepwise(0.024, 0.006, 6, [20, 22, 23, 24], [0.5, 0.25, 0.125, 0.0625], 1024)
    epochs = {
        0: 0.006,
        1: 0.009,
        5: 0.021,
        6: 0.024,
        19: 0.024,
        20: 0.012,
        22: 0.006,
        23: 0.003,
        24: 0.0015,
        99: 0.0015,
    }
    for epoch, rate in epochs.items():
        assert [at(schedule, 1024 * epoch + step) for step in (0, 1023)] == pytest.approx([rate, rate])


def test_steps_without_warmup_begin_at_the_base_rate():
    schedule = stepwise(1.0, 0.25, 0, [1], [0.5], 10)
    assert [at(schedule, step) for step in (0, 9, 10)] == [1.0, 1.0, 0.5]


def test_a_boundary_in_the_warmup_holds_after_it():
    schedule = stepwise(1.0, 0.0, 4, [2], [0.5], 1)
    assert [at(schedule, step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(("boundaries", "factors"), [([2, 2], [0.5, 0.1]), ([3, 1], [0.5, 0.1]), ([1], [0.5, 0.1])])
def test_impossible_boundaries_are_refused(boundaries, factors):
    with pytest.raises(ValueError, match="ascending, one for each of factors"):
        stepwise(1.0, 0.1, 1, boundaries, factors, 10)


def test_cosine_of_llama_2_lora():
    schedule = cosine(4e-4, 1024)
    rates = {0: 4e-4, 256: 2e-4 * (1 + math.sqrt(0.5)), 512: 2e-4, 1024: 0.0, 5000: 0.0}
    assert {s: at(schedule, s) for s in rates} == pytest.approx(rates, rel=1e-6, abs=1e-12)


def test_cosine_to_the_end_of_llama_31():
    """Hand-worked: a warm-up of 3 steps has 4 updates; half of the cosine's 4 is the mean of base and end."""
    schedule = cosine_to(1.0, 0.2, 7, 3)
    halves = [0.2 + 0.4 * (1 + math.cos(math.pi * part / 4)) for part in (1, 2, 3, 4)]
    assert [at(schedule, s) for s in range(9)] == pytest.approx([0.25, 0.5, 0.75, 1.0, *halves, 0.2])
    assert halves[1] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="warmup_steps=7"):
        cosine_to(1.0, 0.1, 7, 7)


def test_the_cosine_of_gpt3_goes_on_where_its_checkpoint_was():
    """The published curve has 265 and 108,600 steps of 1,536 samples; the training continues after 4,000 of them."""
    schedules = {
        batch: cosine_of_samples(2e-5, 2e-6, 265 * 1536, 108_600 * 1536, batch, consumed, 4000)
        for batch, consumed in ((1536, 4000 * 1536), (2048, 3000 * 2048), (2304, 2667 * 2304))
    }
    assert at(schedules[1536], 4000) == pytest.approx(1.994726e-5, rel=5e-7)
    assert at(schedules[2048], 4000) == pytest.approx(1.994726e-5, rel=5e-7)
    assert at(schedules[1536], 4400) == at(schedules[2048], 4300)  # 614,400 samples later
    assert at(schedules[2304], 4000) < at(schedules[1536], 4000)  # 768 samples later


def test_the_cosine_of_gpt3_from_its_first_sample():
    """Hand-worked: steps of 2 samples; a warm-up of 4 has the rates 0, half and all; then half a cosine over 8."""
    schedule = cosine_of_samples(1.0, 0.2, 4, 12, 2)
    halves = [0.2 + 0.4 * (1 + math.cos(math.pi * part / 4)) for part in (1, 2, 3, 4)]
    assert [at(schedule, s) for s in range(8)] == pytest.approx([0.0, 0.5, 1.0, *halves, 0.2])
    assert at(cosine_of_samples(1.0, 0.2, 0, 12, 2), 0) == 1.0
    with pytest.raises(ValueError, match="warmup_samples=12"):
        cosine_of_samples(1.0, 0.1, 12, 12, 1)


def test_cosine_begins_after_its_warmup():
    assert [at(cosine(1.0, 6, 4), s) for s in range(7)] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 0.5, 0], abs=1e-7)


@pytest.mark.parametrize("steps", [(4, 4), (4, -1)])
def test_impossible_cosine_is_refused(steps):
    with pytest.raises(ValueError, match=f"warmup_steps={steps[1]}"):
        cosine(1.0, *steps)


def held_reference(step: int, base: float, warmup: int, start: int, length: int, first: int) -> float:
    """Return the rate of the DLRM reference's scheduler. It depends on all earlier steps, because regions hold the
    rate."""
    rate = base
    for count in range(first, step + first + 1):
        if count < warmup:
            rate = base * (1.0 - (warmup - count) / warmup)
        elif length and start <= count < start + length:
            rate = base * ((length - (count - start)) / length) ** 2
        elif not length:
            rate = base
    return rate


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("warmup", "start", "length"), [(7, 12, 9), (7, 7, 5), (5, 0, 0), (0, 3, 4), (1, 1, 1), (0, 0, 0)]
)
def test_held_polynomial_walks_like_the_dlrm_scheduler(warmup, start, length, first):
    schedule = held_polynomial(24.0, warmup, start, length, first_step=first)
    for step in range(30):
        expected = held_reference(step, 24.0, warmup, start, length, first)
        assert at(schedule, step) == pytest.approx(expected, rel=1e-6, abs=1e-12), step


def test_held_polynomial_at_the_corners_of_batch_55296():
    schedule = held_polynomial(24.0, 2750, 49315, 27772)
    assert at(schedule, 0) == pytest.approx(24.0 / 2750)
    assert at(schedule, 2748) == at(schedule, 20000) == at(schedule, 49313) == pytest.approx(24.0 * 2749 / 2750)
    assert at(schedule, 49314) == 24.0  # the decay begins at the base
    assert at(schedule, 75867) == pytest.approx(24.0 * ((27772 - (75868 - 49315)) / 27772) ** 2)
    assert at(schedule, 49315 + 27772) == pytest.approx(24.0 / 27772**2)
    assert at(schedule, 200000) == pytest.approx(24.0 / 27772**2)


def test_held_polynomial_refuses_a_decay_within_the_warm_up():
    with pytest.raises(ValueError, match="decay_start_step=4"):
        held_polynomial(1.0, 5, 4, 3)
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        held_polynomial(1.0, -1, 4, 3)


def held_exponential_by_table(step: int, epoch: int, steps_per_epoch: int, warmup: int, hold: int) -> float:
    """Return the rate of the RNN-T reference at ``step`` of ``epoch``, both counted from 1."""
    base, floor, gamma = 0.0072, 1e-5, 0.92
    if step < warmup * steps_per_epoch:
        factor = (step + 1) / (warmup * steps_per_epoch + 1)
    elif step < (warmup + hold) * steps_per_epoch:
        factor = 1.0
    else:
        factor = gamma ** (epoch - warmup - hold)
    return max(base * factor, floor)


@pytest.mark.parametrize(("warmup", "hold"), [(5, 26), (1, 0), (0, 2), (0, 0)])
def test_held_exponential_at_every_step_of_its_epochs(warmup, hold):
    spe = 3
    schedule = held_exponential(0.0072, 1e-5, 0.92, spe, warmup, hold)
    step = 0
    for epoch in range(1, warmup + hold + 120):
        for _ in range(spe):
            step += 1
            expected = held_exponential_by_table(step, epoch, spe, warmup, hold)
            assert at(schedule, step - 1) == pytest.approx(expected, rel=1e-6), (epoch, step)


def test_held_exponential_at_its_seams():
    # batch 1,536: 181 steps an epoch; W = 905, W + H = 5,611
    schedule = held_exponential(0.0072, 1e-5, 0.92, 181, 5, 26)
    rates = {step: at(schedule, step - 1) for step in (1, 904, 905, 906, 5611, 5612, 5792, 5793)}
    assert rates[1] == pytest.approx(0.0072 * 2 / 906)
    assert rates[904] == pytest.approx(0.0072 * 905 / 906)
    assert rates[905] == rates[906] == rates[5611] == pytest.approx(0.0072)
    assert rates[5612] == rates[5792] == pytest.approx(0.0072 * 0.92)
    assert rates[5793] == pytest.approx(0.0072 * 0.92**2)
    # 0.0072 * 0.92 ** 78 is 1.078e-5; the next power is below the floor
    assert at(schedule, 181 * (31 + 78) - 1) == pytest.approx(1.078e-5, rel=1e-3)
    assert at(schedule, 181 * (31 + 78)) == at(schedule, 10**6) == pytest.approx(1e-5)


@pytest.mark.parametrize("wrong", [(0.9, 0, 1, 1), (0.9, 3, -1, 1), (0.9, 3, 1, -1), (0.0, 3, 1, 1)])
def test_held_exponential_without_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="must hold"):
        held_exponential(1.0, 0.0, *wrong)
