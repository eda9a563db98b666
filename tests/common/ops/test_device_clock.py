"""Test time stamps on a CPU."""

import time

import torch

from common.ops.device_clock import milliseconds, stamp


def test_a_stamp_lies_between_the_moments_around_it():
    moment = torch.zeros(1, dtype=torch.int64)
    before = time.perf_counter_ns()
    stamp(moment)
    assert before <= moment.item() <= time.perf_counter_ns()


def test_a_difference_is_in_milliseconds():
    before, after = torch.tensor([10**18]), torch.tensor([10**18 + 2_500_000])
    assert milliseconds(before, after).item() == 2.5
