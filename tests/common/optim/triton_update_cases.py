"""The Triton kernels against the reference; run by
tests/test_interpreted_kernels.py."""

import pytest
import torch
from torch import nn
from update_oracle import build, noise, parameter, rate_table, snapshot, step

from common.optim import scale_triton
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import ParameterGroup

RATES = [0.5, 1.0, 2.0, 1.5, 0.25]


def run(implementation, rule, *, inside, dtype, trust, nonfinite_at=None, skip_at=None):
    # 9,800 elements need three blocks; 5 and 7 leave padding; the last group is always float32
    large = nn.Parameter(parameter(200, 7, 7, 1, dtype=dtype).to(memory_format=torch.channels_last))
    small, zero, scale = parameter(5, seed=1, dtype=dtype), nn.Parameter(torch.zeros(64, dtype=dtype)), parameter(7)
    groups = [
        ParameterGroup(
            {"large": large, "zero": zero}, 1e-2, trust_ratio=trust, grad_scale=0.5, learning_rate_in_momentum=inside
        ),
        ParameterGroup({"small": small}, 1e-2, lr_scale=2.0, learning_rate_in_momentum=inside),
        ParameterGroup({"scale": scale}, schedule=rate_table([0.125, 0.75, 0.0, 3.0, 0.5])),
    ]
    parameters = [large, small, zero, scale]
    optimizer = build(groups, rule, RATES, implementation)
    assert optimizer.implementation == implementation
    gradients = [noise(5, *p.shape, seed=index) for index, p in enumerate(parameters)]
    told = []
    for index in range(5):
        now = {p: g[index].clone() for p, g in zip(parameters, gradients, strict=True)}
        if index == nonfinite_at:
            now[large][199, 6, 6] = float("nan")
        told.append(step(optimizer, now, skip=float(index == skip_at)))
    return snapshot(optimizer, *parameters), told


RULES = {
    "lars": (LARS(0.9, eta=0.1), True),
    "lars_of_model": (LARS(0.9, eta=0.1, epsilon=1e-3, norm_of="model"), True),
    "sgd": (SGD(0.9), False),
    "nesterov": (SGD(0.9, nesterov=True), False),
}


# Not bfloat16, to which the interpreter cuts instead of rounding.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", list(RULES))
def test_triton_equals_plain(name, inside, dtype):
    rule, trust = RULES[name]
    ours, _ = run("triton", rule, inside=inside, dtype=dtype, trust=trust)
    plain, _ = run("reference", rule, inside=inside, dtype=dtype, trust=trust)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if a.dtype == torch.float16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("reason", ["nonfinite_at", "skip_at"])
def test_triton_writes_nothing_when_it_must_not(reason):
    rule, trust = RULES["lars"]
    ours, told = run("triton", rule, inside=True, dtype=torch.float16, trust=trust, **{reason: 4})
    plain, _ = run("reference", rule, inside=True, dtype=torch.float16, trust=trust, **{reason: 4})
    assert told == [False] * 4 + [reason == "nonfinite_at"]
    assert int(ours[4]) == 4  # the step counter follows the four parameters
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if a.dtype == torch.float16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lars", "nesterov"])
def test_triton_skip_is_bit_exact(name):
    rule, trust = RULES[name]
    weight = parameter(70, 70, dtype=torch.float16)
    optimizer = build([ParameterGroup({"w": weight}, trust_ratio=trust)], rule, RATES, "triton")
    step(optimizer, {weight: noise(1, 70, 70)[0]})
    before = snapshot(optimizer, weight)
    step(optimizer, {weight: noise(1, 70, 70, seed=3)[0]}, skip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, weight), strict=True))


def test_triton_leaves_padding_zero():
    weight = parameter(65)
    optimizer = build([ParameterGroup({"w": weight}, 0.1, trust_ratio=True)], LARS(0.9), RATES, "triton")
    step(optimizer, {weight: torch.ones(65)})
    flat = dict(optimizer.named_state())["momentum.float32"]
    assert flat.numel() == 128
    assert flat[65:].tolist() == [0.0] * 63


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize("count", [1, 4096, 9801])
def test_a_buffer_is_scaled_like_a_product_in_float32(count, dtype, wide, add):
    x, result, factor = torch.randn(count).to(dtype), torch.randn(count + 8).to(wide), torch.tensor(0.37)
    behind = result[count:].clone()
    expected = (x.float() * factor + (result[:count].float() if add else 0.0)).to(wide)
    scale_triton.scale(x, factor, result[:count], add)
    torch.testing.assert_close(result[:count], expected)
    assert torch.equal(result[count:], behind)


def test_a_buffer_is_scaled_in_place():
    x = torch.randn(5000).half()
    expected = (x.float() * 0.37).half()
    scale_triton.scale(x, torch.tensor(0.37), x, add=False)
    torch.testing.assert_close(x, expected)


def test_a_factor_that_is_no_number_spoils_everything():
    x = torch.randn(5000)
    scale_triton.scale(x, torch.tensor(float("nan")), x, add=False)
    assert x.isnan().all()
