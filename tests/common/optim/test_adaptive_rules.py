"""Test LAMB, AdamW and Adam on shards against float64 formulas, torch.optim and hand-worked cases."""

import numpy as np
import pytest
import torch
from adaptive_oracle import (
    RATES,
    SHAPES,
    assert_follows,
    gradients_of,
    group,
    lamb_steps,
    make_problem,
    make_shard,
    noise,
    rounded,
    run,
)

from common.optim.adaptive import LAMB, Adam, AdamW
from common.optim.rules import Binding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_lamb_follows_algorithm_2(dtype):
    tensors = [noise(*shape, seed=i, scale=0.1) for i, shape in enumerate(SHAPES)]
    settings = [group(0.01, trust=True), group()]
    problem = make_problem(LAMB(), tensors, settings, groups=[0, 1, 0, 1], dtype=dtype)
    gradients = gradients_of(tensors)
    run(problem, gradients)
    starts = rounded(tensors, dtype)
    for index, excluded in enumerate([False, True, False, True]):
        now = [rounded(step, dtype)[index] for step in gradients]
        decay = 0.0 if excluded else 0.01
        rates = [float(np.float32(rate)) for rate in RATES]
        expected = lamb_steps(starts[index], now, rates, weight_decay=decay, trust=not excluded)
        assert_follows(problem, index, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_weights_are_their_rounded_masters(dtype):
    tensors = [noise(70, 70), noise(5)]
    problem = make_problem(LAMB(), tensors, [group(0.01, trust=True), group()], dtype=dtype)
    run(problem, gradients_of(tensors))
    assert torch.equal(problem.shard.parameters, problem.shard.masters.to(dtype))
    assert not torch.equal(problem.shard.parameters.float(), problem.shard.masters)


@pytest.mark.parametrize(("decay", "trust"), [(0.0, True), (0.1, False)], ids=["ratio_alone", "decay_alone"])
def test_decay_and_ratio_are_separate(decay, trust):
    tensor = noise(33, 5)
    problem = make_problem(LAMB(), [tensor], [group(decay, trust)])
    gradients = gradients_of([tensor])
    run(problem, gradients)
    now = [rounded(step, torch.float32)[0] for step in gradients]
    start = rounded([tensor], torch.float32)[0]
    assert_follows(problem, 0, lamb_steps(start, now, RATES, weight_decay=decay, trust=trust))


def test_lamb_hand_worked_first_step():
    # epsilon 1, g = (1, -3): m / (1 - b1) = g, sqrt(v / (1 - b2)) = |g|, so g / (|g| + 1) = (0.5, -0.75);
    # u = (0.5 + 0.1 * 3, -0.75 + 0.1 * 4) = (0.8, -0.35); |w| = 5
    problem = make_problem(LAMB(epsilon=1.0), [torch.tensor([3.0, 4.0])], [group(0.1, True)])
    problem.set_gradients([torch.tensor([1.0, -3.0])])
    problem.apply(0.5, 0)
    ratio = 5.0 / (0.8**2 + 0.35**2) ** 0.5
    weights = problem.part(problem.shard.masters, 0)
    torch.testing.assert_close(weights, torch.tensor([3.0 - 0.5 * ratio * 0.8, 4.0 + 0.5 * ratio * 0.35]))


def test_lamb_without_bias_correction():
    tensor = noise(40, 3)
    rule = LAMB(0.8, 0.95, 1e-4, bias_correction=False)
    problem = make_problem(rule, [tensor], [group(0.01, True)])
    gradients = gradients_of([tensor])
    run(problem, gradients)
    now = [rounded(step, torch.float32)[0] for step in gradients]
    start, knobs = rounded([tensor], torch.float32)[0], {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-4}
    expected = lamb_steps(start, now, RATES, weight_decay=0.01, bias_correction=False, **knobs)
    assert_follows(problem, 0, expected)


def test_bias_correction_reads_the_step():
    # from zero moments: m = 0.5 g and v = 0.25 g^2, so u = (0.5 / (1 - 0.5^t)) / sqrt(0.25 / (1 - 0.75^t)) for g = 1
    for step in (0, 1, 9, 10**6):
        problem = make_problem(LAMB(0.5, 0.75), [torch.zeros(3)], [group()])
        problem.set_gradients([torch.ones(3)])
        problem.apply(1.0, step)
        u = 0.5 / (1 - 0.5 ** (step + 1)) / (0.25 / (1 - 0.75 ** (step + 1))) ** 0.5
        torch.testing.assert_close(problem.part(problem.shard.masters, 0), torch.full((3,), -u), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", [LAMB(0.0, 0.0), LAMB(0.0, 0.999), LAMB(0.9, 0.0)], ids=["none", "v", "m"])
def test_betas_may_be_zero(rule):
    tensor = noise(40, 3)
    problem = make_problem(rule, [tensor], [group(0.01, True)])
    gradients = gradients_of([tensor])
    run(problem, gradients)
    now = [rounded(step, torch.float32)[0] for step in gradients]
    start = rounded([tensor], torch.float32)[0]
    assert_follows(problem, 0, lamb_steps(start, now, RATES, beta1=rule.beta1, beta2=rule.beta2, weight_decay=0.01))


def test_multiplier_and_factor_act_on_every_gradient():
    tensors = [noise(70, 7), noise(9)]
    settings = [group(0.01, True, grad_multiplier=0.125), group(grad_multiplier=2.0)]
    rule = LAMB(0.6, 0.85, epsilon=0.1)  # with this epsilon u depends on the scale of g
    problem = make_problem(rule, tensors, settings)
    gradients = gradients_of(tensors)
    run(problem, gradients, factor=0.25)
    starts = rounded(tensors, torch.float32)
    for index, setting in enumerate(settings):
        now = [rounded(step, torch.float32)[index] * setting.grad_multiplier * 0.25 for step in gradients]
        knobs = {"beta1": 0.6, "beta2": 0.85, "epsilon": 0.1, "weight_decay": setting.weight_decay}
        assert_follows(problem, index, lamb_steps(starts[index], now, RATES, trust=setting.trust_ratio, **knobs))


def test_every_group_is_updated_at_its_own_rate():
    tensors = [torch.zeros(4), torch.full((4,), 2.0)]
    settings = [group(), group(trust=True)]
    problem = make_problem(LAMB(epsilon=1e-12), tensors, settings)
    problem.set_gradients([torch.ones(4), torch.ones(4)])
    problem.apply([0.75, 0.125], 0)  # u = 1 everywhere; the second tensor's ratio is 4 / 2
    torch.testing.assert_close(problem.part(problem.shard.masters, 0), torch.full((4,), -0.75))
    torch.testing.assert_close(problem.part(problem.shard.masters, 1), torch.full((4,), 2.0 - 0.125 * 2.0))


def test_zero_weights_have_ratio_one():
    problem = make_problem(LAMB(epsilon=1e-12), [torch.zeros(70)], [group(0.1, True)])
    problem.set_gradients([torch.full((70,), -4.0)])
    problem.apply(0.5, 0)
    torch.testing.assert_close(problem.part(problem.shard.masters, 0), torch.full((70,), 0.5))


def test_zero_direction_leaves_the_weights():
    tensor = noise(70)
    problem = make_problem(LAMB(), [tensor], [group(0.0, True)])
    problem.apply(0.5, 0)
    assert torch.equal(problem.part(problem.shard.masters, 0), tensor)


def test_zero_gradient_with_decay_shrinks_by_the_rate():
    # u = lambda * w, hence r * u = w whatever lambda
    tensor = noise(70)
    problem = make_problem(LAMB(), [tensor], [group(0.01, True)])
    problem.apply(0.125, 0)
    torch.testing.assert_close(problem.part(problem.shard.masters, 0), 0.875 * tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_of", ["master", "model"])
def test_norm_is_taken_of_the_named_weights(norm_of, dtype):
    # 1 + 0.0015 lies between two values of either dtype, so the norms of masters and model weights differ
    rule = LAMB(norm_of=norm_of)
    problem = make_problem(rule, [torch.ones(8)], [group(trust=True)], dtype=dtype)
    gradients = [np.full(8, -1.0), np.full(8, 2.0)]
    for step, (gradient, rate) in enumerate(zip(gradients, (0.0015, 1.0), strict=True)):
        problem.set_gradients([torch.from_numpy(gradient)])
        problem.apply(rate, step)
    masters = lamb_steps(np.ones(8), gradients[:1], [0.0015])[0]
    normed = torch.tensor(masters[0]).to(dtype).item() if norm_of == "model" else masters[0]
    expected = masters - normed  # all elements are alike, so r * u is the normed weight with the sign of u
    assert abs(masters[0] - 1.0015) < 1e-6
    np.testing.assert_allclose(problem.arrays(0)[0], expected, rtol=1e-4, atol=1e-6)


def test_fused_parts_equal_separate_tensors():
    tensors = [noise(64, 2, seed=i, scale=1.0 + i) for i in range(3)]
    gradients = gradients_of(tensors)
    fused = make_problem(LAMB(), tensors, [group(0.01, True)], groups=[0, 0, 0])
    run(fused, gradients)
    for index, tensor in enumerate(tensors):
        alone = make_problem(LAMB(), [tensor], [group(0.01, True)])
        run(alone, [[step[index]] for step in gradients])
        torch.testing.assert_close(fused.part(fused.shard.masters, index), alone.part(alone.shard.masters, 0))


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [(AdamW(0.8, 0.99), torch.optim.AdamW), (Adam(0.8, 0.99), torch.optim.Adam)],
    ids=["AdamW", "Adam"],
)
def test_adam_equals_torch_optim(rule, theirs):
    tensors = [noise(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    problem = make_problem(rule, tensors, [group(0.1), group()], groups=[0, 1, 0, 1])
    parameters = [torch.nn.Parameter(t.clone()) for t in tensors]
    decaying, others = {"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}
    reference = theirs([decaying, others], lr=1.0, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.1)
    for step, (now, rate) in enumerate(zip(gradients_of(tensors), RATES, strict=True)):
        problem.set_gradients(now)
        problem.apply(rate, step)
        for p, gradient in zip(parameters, now, strict=True):
            p.grad = gradient.clone()
        for settings in reference.param_groups:
            settings["lr"] = rate
        reference.step()
    for index, p in enumerate(parameters):
        ours = problem.part(problem.shard.masters, index)
        torch.testing.assert_close(ours, p.detach().flatten(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rule", [AdamW(), Adam()], ids=["AdamW", "Adam"])
def test_adam_refuses_a_trust_ratio(rule):
    with pytest.raises(ValueError, match="use LAMB"):
        make_problem(rule, [noise(2)], [group(trust=True)])


@pytest.mark.parametrize("rule", [LAMB, AdamW, Adam])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta1": 1.0}, "beta1=1.0"),
        ({"beta2": -0.1}, "beta2=-0.1"),
        ({"beta2": float("nan")}, "beta2=nan"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"epsilon": 1e-50}, "epsilon=1e-50"),
    ],
)
def test_impossible_hyperparameters_are_refused(rule, arguments, message):
    with pytest.raises(ValueError, match=message):
        rule(**arguments)


def test_float64_in_any_shard_takes_the_plain_implementation(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shards = [make_shard([noise(2)], [0], dtype, [i]) for i, dtype in enumerate((torch.float32, torch.float64))]
    assert LAMB().bind(Binding(shards, [group()], 2, lambda _: None), "auto").implementation == "reference"


# Sums and padding of shards


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
@pytest.mark.parametrize("offset", [0, 14_699, 14_720 + 8])
def test_measure_finds_a_gradient_that_is_not_finite(value, offset):
    tensors = [noise(300, 49), noise(9)]
    problem = make_problem(LAMB(), tensors, [group(trust=True), group()], dtype=torch.float16)
    problem.shard.gradients[offset] = value
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
