"""Adagrad's Triton kernel against the reference; run by tests/test_interpreted_kernels.py."""

import pytest
import torch
from torch import nn
from update_oracle import build, noise, parameter, snapshot, step

from common.optim.adagrad import Adagrad
from common.optim.optimizer import ParameterGroup

RATES = [0.5, 1.0, 2.0]


def run(implementation, dtype, *, nonfinite_at=None, skip_at=None):
    # 4,900 elements need two blocks; 5 and 7 leave padding; the last group is always float32
    large, small, scale = parameter(70, 70, dtype=dtype), parameter(5, seed=1, dtype=dtype), parameter(7)
    groups = [
        ParameterGroup({"large": large}, 1e-2, grad_scale=0.5),
        ParameterGroup({"small": small}, lr_scale=2.0),
        ParameterGroup({"scale": scale}),
    ]
    parameters: list[nn.Parameter] = [large, small, scale]
    optimizer = build(groups, Adagrad(), RATES, implementation)
    assert optimizer.implementation == implementation
    gradients = [noise(3, *p.shape, seed=index) for index, p in enumerate(parameters)]
    told = []
    for index in range(3):
        now = {p: g[index].clone() for p, g in zip(parameters, gradients, strict=True)}
        if index == nonfinite_at:
            now[large][69, 69] = float("inf")
        told.append(step(optimizer, now, skip=float(index == skip_at)))
    return snapshot(optimizer, *parameters), told


# Not bfloat16, to which the interpreter cuts instead of rounding.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_plain(dtype):
    ours, _ = run("triton", dtype)
    plain, _ = run("reference", dtype)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if a.dtype == torch.float16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("reason", ["nonfinite_at", "skip_at"])
def test_triton_writes_nothing_when_it_must_not(reason):
    ours, told = run("triton", torch.float16, **{reason: 2})
    assert told == [False] * 2 + [reason == "nonfinite_at"]
    weight = parameter(70, 70, dtype=torch.float16)
    optimizer = build([ParameterGroup({"w": weight})], Adagrad(), RATES, "triton")
    step(optimizer, {weight: noise(1, 70, 70)[0]})
    before = snapshot(optimizer, weight)
    bad = torch.full((70, 70), float("nan"))
    step(optimizer, {weight: bad if reason == "nonfinite_at" else torch.ones(70, 70)}, skip=float(reason == "skip_at"))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, weight), strict=True))
    assert int(ours[3]) == 2  # the step counter follows the three parameters


def test_triton_measures_the_norm_as_the_plain_update_does():
    weight = parameter(200, 50)
    found = []
    for implementation in ("triton", "reference"):
        optimizer = build([ParameterGroup({"w": weight}, grad_scale=0.5)], Adagrad(), RATES, implementation)
        (update,) = [value for value in vars(optimizer).values() if hasattr(value, "kinds")]
        optimizer.begin()
        weight.grad.copy_(noise(1, 200, 50)[0])
        stats = torch.zeros(2)
        update.measure(stats)
        found.append(stats)
    torch.testing.assert_close(found[0], found[1])
    assert found[0][1] == pytest.approx(0.25 * noise(1, 200, 50)[0].double().square().sum().item(), rel=1e-5)
