"""LAMB, AdamW and Adam on shards: what they report, what a skipped update leaves, and several dtypes."""

import numpy as np
import pytest
import torch
from adaptive_oracle import (
    RATES,
    gradients_of,
    group,
    make_problem,
    make_shard,
    noise,
    rounded,
    run,
)

from common.optim.adaptive import LAMB, Adam, AdamW
from common.optim.rules import Binding


@pytest.mark.parametrize("rule", [LAMB(), AdamW(), Adam()], ids=["LAMB", "AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_without_write_no_bit_changes(rule, dtype):
    trust = isinstance(rule, LAMB)
    tensors = [noise(70, 70), noise(9)]
    problem = make_problem(rule, tensors, [group(0.1, trust), group(0.1)], dtype=dtype)
    run(problem, gradients_of(tensors, 2), RATES[:2])
    before = problem.snapshot()
    problem.set_gradients([torch.full((70, 70), float("nan")), torch.full((9,), float("inf"))])
    problem.apply(0.1, 2, write=False)
    assert all(torch.equal(a, b) for a, b in zip(before, problem.snapshot(), strict=True))


def test_update_after_a_skipped_one_is_a_normal_one():
    tensors = [noise(70, 70), noise(9)]
    gradients = gradients_of(tensors, 2)
    results = []
    for skips in (False, True):
        problem = make_problem(LAMB(), tensors, [group(0.1, True), group()])
        for step, now in enumerate(gradients):
            if skips:
                problem.set_gradients([torch.full_like(t, float("nan")) for t in tensors])
                problem.apply(0.1, step, write=False)
            problem.set_gradients(now)
            problem.apply(0.1, step)
        results.append(problem.snapshot())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rule", [LAMB(), Adam()], ids=["LAMB", "Adam"])
def test_padding_stays_zero(rule):
    problem = make_problem(rule, [noise(65)], [group(0.1, isinstance(rule, LAMB))])
    run(problem, [[noise(65, seed=s)] for s in range(5)])
    for flat in problem.snapshot():
        assert flat.numel() == 128
        assert flat[65:].tolist() == [0.0] * 63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measure_reports_the_weighted_sum_of_squares(dtype):
    tensors = [noise(300, 49), noise(9)]
    settings = [group(trust=True, grad_multiplier=0.5, share=0.25), group(grad_multiplier=3.0)]
    problem = make_problem(LAMB(), tensors, settings, dtype=dtype)
    gradients = gradients_of(tensors, 1)[0]
    problem.set_gradients(gradients)
    large, small = rounded(gradients, dtype)
    infinite, squares = problem.measure()
    assert infinite == 0.0
    assert squares == pytest.approx(0.25 * ((0.5 * large) ** 2).sum() + ((3.0 * small) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 14_699, 14_720 + 8])
def test_measure_finds_a_gradient_that_is_not_finite(value, place):
    tensors = [noise(300, 49), noise(9)]
    problem = make_problem(LAMB(), tensors, [group(trust=True), group()], dtype=torch.float16)
    problem.shard.gradients[place] = value
    assert problem.measure()[0] > 0.0


def test_largest_finite_gradient_is_finite():
    problem = make_problem(LAMB(), [noise(9)], [group()], dtype=torch.float16)
    problem.set_gradients([torch.full((9,), 65504.0)])
    assert problem.measure() == (0.0, pytest.approx(9 * 65504.0**2, rel=1e-5))


def test_two_dtypes_share_one_sum():
    tensors, gradients = [noise(70, 7), noise(9)], [noise(70, 7, seed=8), noise(9, seed=9)]
    settings, sums = [group(0.01, True)], []
    shards = [
        make_shard(tensors[:1], [0], torch.bfloat16, numbers=[1]),
        make_shard(tensors[1:], [0], torch.float32, numbers=[0]),
    ]
    update = LAMB().bind(Binding(shards, settings, 2, lambda t: sums.append(t.clone())), "reference")
    for shard, gradient in zip(shards, gradients, strict=True):
        shard.gradients[: gradient.numel()] = gradient.flatten()
    update.apply(torch.tensor([0.1]), torch.tensor(0), torch.tensor(1.0), torch.tensor(True))
    weights = rounded(tensors[:1], torch.bfloat16) + rounded(tensors[1:], torch.float32)
    directions = rounded(gradients[:1], torch.bfloat16) + rounded(gradients[1:], torch.float32)
    assert len(sums) == 1
    u = [g / (np.abs(g) + 1e-6) + 0.01 * w for g, w in zip(directions, weights, strict=True)]
    expected = [(weights[1] ** 2).sum(), (weights[0] ** 2).sum(), (u[1] ** 2).sum(), (u[0] ** 2).sum()]
    np.testing.assert_allclose(sums[0].flatten().numpy(), expected, rtol=1e-5)
    for shard, weight, direction in zip(shards, weights, u, strict=True):
        moved = weight - 0.1 * np.linalg.norm(weight) / np.linalg.norm(direction) * direction
        np.testing.assert_allclose(shard.masters[: len(weight)].numpy(), moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [LAMB(), AdamW()], ids=["LAMB", "AdamW"])
def test_nothing_is_summed_without_trust_ratio(rule):
    def refuse(_: torch.Tensor) -> None:
        raise AssertionError("a collective that no ratio needs")

    shard = make_shard([noise(9)], [0], torch.float32)
    update = rule.bind(Binding([shard], [group(0.1)], 1, refuse), "reference")
    shard.gradients[:9] = 1.0
    before = shard.masters.clone()
    update.apply(torch.tensor([0.1]), torch.tensor(0), torch.tensor(1.0), torch.tensor(True))
    assert not torch.equal(shard.masters, before)
