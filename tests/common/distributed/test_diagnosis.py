"""Which rank is named, case by case."""

from dataclasses import replace

import pytest

from common.distributed.diagnosis import View, diagnose

HEALTHY = View(0, step=7, device_step=6, phase="train", beat_age=0.1, silence=0.1, allowance=4.0)
WAITS = replace(HEALTHY, beat_age=5.0, waiting=True, where="all_reduce from a/b.py:3 (step)")


def ranks(*views):
    numbered = [replace(view, rank=rank) for rank, view in enumerate(views)]
    diagnosis = diagnose(numbered, timeout_seconds=4.0)
    return None if diagnosis is None else diagnosis.ranks


def test_healthy_ranks_are_left_alone():
    assert ranks(HEALTHY, HEALTHY) is None


def test_a_silent_rank_is_named_before_those_that_wait_for_it():
    assert ranks(WAITS, replace(HEALTHY, silence=5.0), WAITS) == (1,)


@pytest.mark.parametrize("beat_age", [3.9, 4.1])
def test_a_silent_rank_counts_neither_as_stuck_nor_as_running(beat_age):
    views = [WAITS, replace(HEALTHY, rank=1, beat_age=beat_age, silence=3.8)]
    diagnosis = diagnose(views, timeout_seconds=4.0)
    assert diagnosis.ranks == (1,)
    assert "rank 1 gives no sign of life" in diagnosis.text


def test_a_rank_stuck_outside_of_collectives_is_named():
    assert ranks(WAITS, WAITS, replace(WAITS, waiting=False)) == (2,)


def test_waiting_for_a_rank_with_an_extended_limit_is_excused():
    assert ranks(WAITS, replace(HEALTHY, beat_age=5.0, allowance=60.0, extended=True)) is None


def test_an_extended_limit_that_is_over_excuses_nobody():
    assert ranks(WAITS, replace(HEALTHY, beat_age=61.0, allowance=60.0, extended=True)) == (1,)


def test_one_rank_ahead_of_two_is_the_odd_one():
    assert ranks(WAITS, replace(WAITS, step=8), WAITS) == (1,)


def test_one_rank_in_another_collective_is_the_odd_one():
    assert ranks(replace(WAITS, where="barrier"), WAITS, WAITS) == (0,)


def test_two_ranks_apart_are_both_named():
    assert ranks(WAITS, replace(WAITS, step=8)) == (0, 1)


def test_a_rank_that_runs_on_without_the_others_is_named():
    assert ranks(WAITS, replace(HEALTHY, step=90)) == (1,)


def test_a_rank_that_left_is_named_when_others_wait():
    assert ranks(WAITS, replace(HEALTHY, silence=9.0, left=True)) == (1,)


def test_a_rank_that_left_is_no_fault_while_nobody_waits():
    assert ranks(HEALTHY, replace(HEALTHY, silence=9.0, left=True)) is None


def test_the_slower_device_is_named_when_all_wait_in_the_same_place():
    assert ranks(WAITS, replace(WAITS, device_step=5), WAITS) == (1,)


def test_nobody_is_singled_out_when_all_wait_alike():
    assert ranks(WAITS, WAITS) == (0, 1)


def test_the_message_holds_step_phase_and_age():
    view = View(3, step=7, device_step=6, phase="evaluation", beat_age=12.34, silence=0.0, allowance=4.0)
    text = diagnose([view], timeout_seconds=4.0).text
    assert "rank 3" in text
    assert "step 7, phase 'evaluation', device finished step 6, last beat 12.3 s ago" in text
