"""What only the Triton kernels have to show; run by
tests/test_interpreted_kernels.py."""

import pytest
import torch
from adaptive_oracle import RATES, assert_follows, gradients_of, group, lamb_steps, make_problem, noise, rounded, run
from remainder_oracle import steps_of_both
from wide_gradients_oracle import RULES, follows_float32_weights, follows_torch

from common.optim import adaptive_triton
from common.optim.adaptive import LAMB
from common.optim.shard import Fragment, Shard


def test_triton_adds_up_over_many_chunks(monkeypatch):
    for name, value in (("BLOCK", 64), ("CHUNK", 2), ("MEASURED_BLOCKS", 3)):
        monkeypatch.setattr(adaptive_triton, name, value)
    tensors = [noise(30, 49), noise(1000, seed=1)]
    problem = make_problem(LAMB(), "triton", tensors, [group(0.01, True), group(0.01, True)])
    gradients = gradients_of(tensors, 1)
    run(problem, gradients, RATES[:1])
    start, now = rounded(tensors, torch.float32), rounded(gradients[0], torch.float32)
    assert problem.measure()[1] == pytest.approx(sum((g**2).sum() for g in now), rel=1e-5)
    for index in range(2):
        assert_follows(problem, index, lamb_steps(start[index], [now[index]], RATES[:1], weight_decay=0.01))


def test_triton_refuses_a_fragment_off_the_alignment():
    shard = Shard(*(torch.zeros(128) for _ in range(3)), (Fragment(0, 0, 32, 32, 64),))
    with pytest.raises(ValueError, match="multiples of 64"):
        LAMB().bind([shard], [group()], 1, lambda _: None, "triton")


def test_triton_updates_masters_that_are_kept_as_remainders():
    steps_of_both("triton")


def test_triton_reads_float32_gradients_beside_remainders():
    follows_torch("triton")


@pytest.mark.parametrize("rule", list(RULES))
def test_triton_reads_all_bits_of_float32_gradients(rule):
    follows_float32_weights(rule, "after", "triton")
