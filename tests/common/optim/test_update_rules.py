"""Test LARS, SGD and Adagrad against float64 formulas, torch.optim and hand-worked cases."""

import numpy as np
import pytest
import torch
from update_oracle import (
    build,
    momentum_of,
    momentum_steps,
    noise,
    parameter,
    rate_table,
    snapshot,
    step,
    step_beside,
)

from common.errors import UnsupportedImplementation
from common.optim.adaptive import LAMB, Adagrad, Adam, AdamW
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import ParameterGroup
from common.optim.update_cases import LLAMA_LAYER, bert, resnet
from tests.capturable import Capturable

RATES = [0.5, 1.0, 2.0, 1.5, 0.25]


def as_arrays(tensors):
    return [t.double().numpy() for t in tensors]


@pytest.mark.parametrize("inside", [True, False], ids=["rate_inside", "rate_outside"])
def test_lars_follows_the_formula_while_the_rate_changes(inside):
    weight, gradients = parameter(6, 4, 3, 3), noise(5, 6, 4, 3, 3)
    start = weight.detach().double().numpy().copy()
    group = ParameterGroup({"w": weight}, 5e-5, trust_ratio=True, learning_rate_in_momentum=inside)
    optimizer = build([group], LARS(0.9), RATES)
    for gradient in gradients:
        step(optimizer, {weight: gradient})
    expected, buffer = momentum_steps(
        start, as_arrays(gradients), RATES, weight_decay=5e-5, trust=True, inside=inside, eta=0.001
    )
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(momentum_of(optimizer, "w"), buffer, rtol=1e-5, atol=1e-9)


def test_lars_hand_worked_first_step():
    # |w| = 5, |g| = 10, lambda = 0.5: tau = 0.1 * 5 / (10 + 0.5 * 5) = 0.04; d = (6 + 1.5, 8 + 2) = (7.5, 10)
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = build([ParameterGroup({"w": weight}, 0.5, trust_ratio=True)], LARS(0.9, eta=0.1), [2.0])
    step(optimizer, {weight: torch.tensor([6.0, 8.0])})
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0 - 2.0 * 0.04 * 7.5, 4.0 - 2.0 * 0.04 * 10.0]))


def test_lars_epsilon_is_added_to_the_denominator():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = build([ParameterGroup({"w": weight}, trust_ratio=True)], LARS(0.9, eta=1.0, epsilon=15.0), [1.0])
    step(optimizer, {weight: torch.tensor([0.0, 10.0])})  # tau = 5 / (10 + 15) = 0.2
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0 - 0.2 * 10.0]))


def test_parts_of_a_parameter_have_ratios_of_their_own():
    fused, gradients = parameter(128, 3), noise(3, 128, 3)
    halves = [torch.nn.Parameter(half.clone()) for half in fused.detach().chunk(2)]
    one = build([ParameterGroup({"w": fused}, 0.1, trust_ratio=True, parts={"w": 2})], LARS(0.9, eta=0.1), RATES)
    two = build(
        [ParameterGroup(dict(zip("ab", halves, strict=True)), 0.1, trust_ratio=True)], LARS(0.9, eta=0.1), RATES
    )
    for gradient in gradients:
        gradient[64:] *= 10
        step(one, {fused: gradient})
        step(two, dict(zip(halves, gradient.chunk(2), strict=True)))
    torch.testing.assert_close(fused.detach(), torch.cat([half.detach() for half in halves]))


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_zero_norm_gives_ratio_one(zero):
    weight = torch.nn.Parameter(torch.zeros(4) if zero == "weight" else torch.ones(4))
    gradient = torch.zeros(4) if zero == "gradient" else torch.ones(4)
    optimizer = build([ParameterGroup({"w": weight}, 0.25, trust_ratio=True)], LARS(0.9), [0.5])
    step(optimizer, {weight: gradient})
    expected = -0.5 if zero == "weight" else 1.0 - 0.5 * 0.25
    assert weight.tolist() == [expected] * 4


def test_grad_divisor_and_grad_scale_act_before_the_norms():
    weight, gradients = parameter(5, 5), noise(3, 5, 5)
    start = weight.detach().double().numpy().copy()
    group = ParameterGroup({"w": weight}, 1e-2, trust_ratio=True, grad_scale=0.5)
    optimizer = build([group], LARS(0.9), RATES[:3], grad_divisor=16.0)
    for gradient in gradients:
        step(optimizer, {weight: gradient * 32.0})  # the sum; the mean is 32 * 0.5 / 16 = 1 times the gradient
    expected, _ = momentum_steps(start, as_arrays(gradients), RATES[:3], weight_decay=1e-2, trust=True)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("inside", [True, False])
def test_a_group_with_a_schedule_follows_that_and_the_others_the_optimizers(inside):
    weight, bias = parameter(6, 5, dtype=torch.float64), parameter(7, dtype=torch.float64)
    starts = [p.detach().numpy().copy() for p in (weight, bias)]
    rates, own = RATES, [2.0 * rate + 0.125 * index for index, rate in enumerate(RATES)]
    groups = [
        ParameterGroup({"weight": weight}, 0.01, learning_rate_in_momentum=inside),
        ParameterGroup({"bias": bias}, lr_scale=0.5, schedule=rate_table(own), learning_rate_in_momentum=inside),
    ]
    optimizer = build(groups, SGD(0.9), rates)
    gradients = [noise(5, 6, 5), noise(5, 7, seed=101)]
    for index, now in enumerate(zip(*gradients, strict=True)):
        step(optimizer, dict(zip((weight, bias), now, strict=True)))
        assert optimizer.metrics["learning_rate"].item() == np.float32(rates[index])
    followed = ((weight, rates, 0.01), (bias, [0.5 * rate for rate in own], 0.0))
    for (p, rates_of_p, decay), start, given in zip(followed, starts, gradients, strict=True):
        exact = [float(np.float32(rate)) for rate in rates_of_p]
        expected, _ = momentum_steps(start, as_arrays(given), exact, weight_decay=decay, inside=inside)
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


def test_an_update_that_is_skipped_leaves_every_groups_schedule_where_it_is():
    bias = torch.nn.Parameter(torch.zeros(1))
    optimizer = build([ParameterGroup({"bias": bias}, schedule=rate_table([0.25, 8.0]))], SGD(0.0), [1.0, 1.0])
    step(optimizer, {bias: torch.ones(1)}, skip=1.0)
    step(optimizer, {bias: torch.ones(1)})
    assert bias.item() == -0.25
    plain = build([ParameterGroup({"bias": torch.nn.Parameter(torch.zeros(1))})], SGD(0.0), [1.0])
    assert set(optimizer.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_the_rate_outside_equals_torch_sgd(nesterov, weight_decay):
    ours, theirs = parameter(6, 5, dtype=torch.float64), parameter(6, 5, dtype=torch.float64)
    group = ParameterGroup({"w": ours}, weight_decay, learning_rate_in_momentum=False)
    optimizer = build([group], SGD(0.9, nesterov), RATES)
    reference = torch.optim.SGD([theirs], lr=1.0, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov)
    step_beside(optimizer, ours, reference, theirs, RATES)
    buffer = reference.state[theirs]["momentum_buffer"].numpy()
    np.testing.assert_allclose(momentum_of(optimizer, "w"), buffer, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("inside", [True, False], ids=["rate_inside", "rate_outside"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_the_formula_while_the_rate_changes(nesterov, inside):
    weight, gradients = parameter(6, 5, dtype=torch.float64), noise(5, 6, 5)
    start = weight.detach().numpy().copy()
    group = ParameterGroup({"w": weight}, 0.01, learning_rate_in_momentum=inside)
    optimizer = build([group], SGD(0.9, nesterov), RATES)
    for gradient in gradients:
        step(optimizer, {weight: gradient})
    expected, buffer = momentum_steps(
        start, as_arrays(gradients), RATES, weight_decay=0.01, inside=inside, nesterov=nesterov
    )
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(momentum_of(optimizer, "w"), buffer, rtol=1e-14, atol=1e-14)


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ValueError, match=r"momentum=0\.0"):
        SGD(0.0, nesterov=True)


def test_sgd_refuses_a_trust_ratio():
    with pytest.raises(ValueError, match="use LARS"):
        build([ParameterGroup({"w": parameter(2)}, trust_ratio=True)], SGD(0.9), [1.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_their_rounded_masters(dtype):
    weight, gradients = parameter(4, 6, dtype=dtype), [g.to(dtype) for g in noise(5, 4, 6)]
    start = weight.detach().double().numpy().copy()
    optimizer = build([ParameterGroup({"w": weight}, 1e-3, trust_ratio=True)], LARS(0.9), RATES)
    for gradient in gradients:
        step(optimizer, {weight: gradient})
    masters = optimizer.state_dict()["masters"]["w"]
    expected, _ = momentum_steps(start, as_arrays(gradients), RATES, weight_decay=1e-3, trust=True)
    np.testing.assert_allclose(masters.numpy(), expected, rtol=2e-6, atol=1e-7)
    assert torch.equal(weight.detach(), masters.to(dtype))


@pytest.mark.parametrize("norm_of", ["master", "model"])
def test_norm_is_taken_of_the_named_weights(norm_of):
    # 1 - 3e-4 rounds to 0.99951 in float16, so the norms of master and model weights differ by 2e-4 after a step
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    gradients = [np.full(8, 1.0), np.full(8, 1.0)]
    group = ParameterGroup({"w": weight}, trust_ratio=True)
    optimizer = build([group], LARS(0.9, eta=1.0, norm_of=norm_of), [3e-4, 1.0])
    for gradient in gradients:
        step(optimizer, {weight: torch.from_numpy(gradient)})
    dtype = np.float16 if norm_of == "model" else np.float64
    _, buffer = momentum_steps(np.ones(8), gradients, [3e-4, 1.0], trust=True, eta=1.0, norm_dtype=dtype)
    np.testing.assert_allclose(momentum_of(optimizer, "w"), buffer, rtol=1e-6)


RULES = {
    "lars": LARS(0.9), "nesterov": SGD(0.9, nesterov=True), "adagrad": Adagrad(), "lamb": LAMB(), "adamw": AdamW(),
    "adam": Adam(),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_skip_writes_nothing(rule):
    weight, half = parameter(5, 3), parameter(9, dtype=torch.float16)
    group = ParameterGroup({"w": weight, "h": half}, 1e-4, trust_ratio=isinstance(rule, LARS | LAMB))
    optimizer = build([group], rule, RATES)
    step(optimizer, {weight: noise(1, 5, 3)[0], half: noise(1, 9)[0]})
    before = snapshot(optimizer, weight, half)
    assert not step(optimizer, {weight: noise(1, 5, 3, seed=7)[0], half: noise(1, 9, seed=7)[0]}, skip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, weight, half), strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradient_that_is_not_finite_writes_nothing_anywhere(rule, value):
    weight, half = parameter(5, 3), parameter(9, dtype=torch.float16)
    groups = [ParameterGroup({"w": weight}, trust_ratio=isinstance(rule, LARS | LAMB)), ParameterGroup({"h": half})]
    optimizer = build(groups, rule, RATES)
    bad = torch.ones(9)
    bad[8] = value
    step(optimizer, {weight: noise(1, 5, 3)[0], half: torch.ones(9)})
    before = snapshot(optimizer, weight, half)
    assert step(optimizer, {weight: noise(1, 5, 3)[0], half: bad})
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, weight, half), strict=True))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_update_after_an_overflow_is_a_normal_one(rule):
    weights = [parameter(5, 3), parameter(5, 3)]
    for overflows, weight in enumerate(weights):
        optimizer = build([ParameterGroup({"w": weight}, 0.1, trust_ratio=isinstance(rule, LARS | LAMB))], rule, RATES)
        for gradient in noise(2, 5, 3):
            if overflows:
                assert step(optimizer, {weight: torch.full((5, 3), float("nan"))})
            assert not step(optimizer, {weight: gradient})
    assert torch.equal(*weights)


def test_triton_without_a_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedImplementation, match=r"^optimizer\.implementation=triton: .*GPU"):
        build([ParameterGroup({"w": parameter(2)})], SGD(0.9), [1.0], implementation="triton")


@pytest.mark.parametrize("rule", [SGD(0.9), LAMB()], ids=["sgd", "lamb"])
def test_an_unknown_implementation_is_refused_with_its_key_and_the_choices(rule):
    with pytest.raises(UnsupportedImplementation, match=r"^optimizer\.implementation=foo: .*auto, triton, reference"):
        build([ParameterGroup({"w": parameter(2)})], rule, [1.0], implementation="foo")


@pytest.mark.parametrize(
    ("tensors", "count", "elements"),
    [
        (bert(1024, 24, 30522), 398, 336_226_108),
        ([*resnet()[0], *resnet()[1]], 161, 25_557_032),
        (LLAMA_LAYER, 6, 218_112_000),
    ],
    ids=["bert", "resnet", "llama"],
)
def test_cases_have_the_tensors_of_the_networks(tensors, count, elements):
    assert (len(tensors), sum(size for size, _ in tensors)) == (count, elements)


# Adagrad


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
def test_adagrad_equals_torch_adagrad(epsilon, weight_decay):
    ours, theirs = parameter(6, 5, dtype=torch.float64), parameter(6, 5, dtype=torch.float64)
    optimizer = build([ParameterGroup({"w": ours}, weight_decay)], Adagrad(epsilon), RATES)
    reference = torch.optim.Adagrad([theirs], lr=1.0, eps=epsilon, weight_decay=weight_decay)
    step_beside(optimizer, ours, reference, theirs, RATES)
    torch.testing.assert_close(optimizer.state_dict()["sum"]["w"], reference.state[theirs]["sum"])


def test_adagrad_hand_worked_two_steps():
    # gradients 3 and 4 at rates 0.5 and 2, epsilon 1: 0.5 * 3 / (3 + 1), then 2 * 4 / (5 + 1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = build([ParameterGroup({"w": weight})], Adagrad(1.0), [0.5, 2.0])
    step(optimizer, {weight: torch.full((1,), 3.0)})
    assert weight.item() == -0.375
    step(optimizer, {weight: torch.full((1,), 4.0)})
    assert weight.item() == pytest.approx(-0.375 - 4.0 / 3.0)


def test_the_first_step_of_adagrad_has_the_size_of_the_rate_and_no_gradient_gives_none():
    weight = torch.nn.Parameter(torch.zeros(3))
    step(build([ParameterGroup({"w": weight})], Adagrad(), [0.25]), {weight: torch.tensor([1e-4, -7.0, 0.0])})
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.25, 0.25, 0.0]), rtol=2e-4, atol=0.0)
    assert weight[2] == 0.0


def test_divisor_and_scales_of_adagrad_are_those_of_the_groups():
    weight = torch.nn.Parameter(torch.zeros(1))
    group = ParameterGroup({"w": weight}, lr_scale=2.0, grad_scale=0.5)
    optimizer = build([group], Adagrad(1.0), [0.25], grad_divisor=4.0)
    step(optimizer, {weight: torch.full((1,), 24.0)})  # 24 * 0.5 / 4 = 3
    assert weight.item() == -0.25 * 2.0 * 3.0 / 4.0


def test_adagrad_has_masters_state_and_a_checkpoint_like_the_others():
    half, beside = parameter(9, dtype=torch.float16), parameter(7)
    optimizer = build([ParameterGroup({"half": half, "beside": beside})], Adagrad(), RATES)
    names = [name for name, _ in optimizer.named_state()]
    assert names == ["step", "masters.float16", "sum.float16", "sum.float32"]
    assert set(optimizer.state_dict()) == {"step", "sum", "masters"}


def test_an_update_can_be_recorded_in_a_graph():
    weight = parameter(9, dtype=torch.float16)
    optimizer = build([ParameterGroup({"w": weight})], Adagrad(), RATES)
    rates, factor, write, stats, count = (
        torch.tensor([0.5]), torch.tensor(1.0), torch.tensor(True), torch.zeros(2), torch.tensor(0),
    )  # fmt: skip
    (update,) = [value for value in vars(optimizer).values() if hasattr(value, "kinds")]
    with Capturable():
        update.measure(stats)
        update.apply(rates, count, factor, write)


def test_it_refuses_trust_ratios_and_names_a_rule_that_has_them():
    with pytest.raises(ValueError, match="Adagrad has no trust ratio; use LAMB"):
        build([ParameterGroup({"w": parameter(3)}, trust_ratio=True)], Adagrad(), RATES)


@pytest.mark.parametrize("epsilon", [0.0, 1e-40, float("nan")])
def test_an_epsilon_that_float32_does_not_hold_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon="):
        Adagrad(epsilon)
