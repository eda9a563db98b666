"""Test clipping by the global norm against the formula in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adaptive_oracle import lamb_steps
from update_oracle import rate_table

from common.distributed.layout import Layout
from common.optim.adaptive import LAMB
from common.optim.momentum import SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.train_step import apply_gradients

SHAPES = {"a": (7, 9), "b": (5,), "c": (130,)}
GRAD_SCALE = {"a": 1.0, "b": 0.5, "c": 0.5}
MICRO_BATCHES, GRAD_DIVISOR = 3, 12.0  # losses summed over 4 samples each


class Case:
    """Three parameters in two groups and the gradients of three micro-batches."""

    def __init__(self, clip: ClipNorm | None, dtype: torch.dtype, micro_batches: int = MICRO_BATCHES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = {n: torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for n, s in SHAPES.items()}
        self.gradients = [
            {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()} for _ in range(micro_batches)
        ]
        self.micro_batches = micro_batches
        a, rest = {"a": self.parameters["a"]}, {n: self.parameters[n] for n in "bc"}
        self.optimizer = Optimizer(
            [ParameterGroup(a), ParameterGroup(rest, grad_scale=0.5)], SGD(0.0), rate_table([1.0] * 9), Layout(),
            grad_divisor=4.0 * micro_batches, clip=clip, micro_batches=micro_batches,
        )  # fmt: skip

    def iterate(self) -> dict[str, np.ndarray]:
        """Run a step, and return the negative change of each parameter."""
        self.optimizer.begin()
        for index, gradients in enumerate(self.gradients):
            if index == self.micro_batches - 1:
                self.optimizer.arm()
            for name, parameter in self.parameters.items():
                parameter.grad.add_(gradients[name])  # as a backward pass does
            self.optimizer.collect()
        self.overflow = bool(apply_gradients([self.optimizer], torch.tensor(0.0)))
        masters = self.optimizer.state_dict().get("masters", {})
        return {n: -masters.get(n, p.detach()).double().numpy() for n, p in self.parameters.items()}

    def means(self) -> list[dict[str, np.ndarray]]:
        """Return the mean gradient of each micro-batch over its four samples."""
        return [{n: GRAD_SCALE[n] * g.double().numpy() / 4 for n, g in gs.items()} for gs in self.gradients]


def norm(gradients: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in gradients.values())))


def factor(gradients: dict[str, np.ndarray], max_norm: float) -> float:
    return min(1.0, max_norm / (norm(gradients) + 1e-6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_after_the_reduction_the_mean_is_clipped(max_norm, dtype):
    case = Case(ClipNorm(max_norm, "after_reduction"), dtype)
    mean = {n: sum(m[n] for m in case.means()) / MICRO_BATCHES for n in SHAPES}
    moved = case.iterate()
    for name, gradient in mean.items():
        np.testing.assert_allclose(moved[name], factor(mean, max_norm) * gradient, rtol=1e-5, atol=1e-7)
    assert case.optimizer.metrics["gradient_norm"].item() == pytest.approx(norm(mean), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_before_the_reduction_each_micro_batch_is_clipped_by_its_own_norm(micro_batches, max_norm, dtype):
    case = Case(ClipNorm(max_norm, "before_reduction"), dtype, micro_batches)
    clipped = [{n: factor(mean, max_norm) * g for n, g in mean.items()} for mean in case.means()]
    moved = case.iterate()
    for name in SHAPES:
        expected = sum(mean[name] for mean in clipped) / micro_batches
        np.testing.assert_allclose(moved[name], expected, rtol=1e-5, atol=1e-7)


def test_clipped_half_gradients_are_added_up_in_float32():
    case = Case(ClipNorm(0.1, "before_reduction"), torch.bfloat16)
    clipped = [{n: factor(mean, 0.1) * g for n, g in mean.items()} for mean in case.means()]
    moved = case.iterate()
    for name in SHAPES:
        expected = sum(mean[name] for mean in clipped) / MICRO_BATCHES
        # rounded to bfloat16 once, not once for each micro-batch
        np.testing.assert_allclose(moved[name], expected, rtol=2.0**-8, atol=1e-7)


def test_a_second_iteration_starts_its_sums_anew():
    case = Case(ClipNorm(0.1, "before_reduction"), torch.float64)
    first = case.iterate()
    second = case.iterate()
    for name in SHAPES:
        np.testing.assert_allclose(second[name], 2 * first[name], rtol=1e-12)


def test_sums_in_float32_exist_only_for_several_micro_batches():
    clip = ClipNorm(1.0, "before_reduction")
    assert Case(clip, torch.float32, 1).optimizer._clipper._sums == []
    assert len(Case(clip, torch.float32, 3).optimizer._clipper._sums) == 1


@pytest.mark.parametrize("when", ["before_reduction", "after_reduction"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_writes_nothing(when, value):
    case = Case(ClipNorm(1.0, when), torch.float32)
    case.gradients[0]["b"][3] = value
    assert all((moved == 0).all() for moved in case.iterate().values())
    assert case.overflow


@pytest.mark.parametrize("when", ["before_reduction", "after_reduction"])
def test_a_norm_too_large_for_float32_is_an_overflow_and_no_step_of_zero(when):
    case = Case(ClipNorm(1.0, when), torch.float32)
    case.gradients[1]["a"].fill_(1e30)  # finite, but its square is not
    assert all((moved == 0).all() for moved in case.iterate().values())
    assert case.overflow
    assert case.optimizer.state_dict()["step"].item() == 0


def test_several_micro_batches_of_an_optimizer_built_for_one_are_refused():
    case = Case(ClipNorm(1.0, "before_reduction"), torch.float32, 1)
    case.optimizer.begin()
    with pytest.raises(RuntimeError, match="micro_batches"):
        case.optimizer.collect()  # not armed: there is another to come


@pytest.mark.parametrize("options", [(0.0, "after_reduction"), (float("inf"), "after_reduction"), (1.0, "sometimes")])
def test_clipping_without_sense_is_refused(options):
    with pytest.raises(ValueError, match=r"max_norm=|when="):
        ClipNorm(*options)


# LAMB as MLPerf RNN-T uses it: decay and ratio on every parameter, a tiny epsilon, the mean gradient clipped


RATES = [0.25, 0.125, 0.5, 0.125]
LAMB_SHAPES = {"weight_hh": (32, 8), "bias_hh": (32,), "embedding": (9, 8)}
DIVISOR = 4.0


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.float16, 2e-5)], ids=str
)
def test_every_parameter_decays_by_its_ratio_after_the_clip(dtype, rtol):
    generator = torch.Generator().manual_seed(5)
    parameters = {
        name: torch.nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype))
        for name, shape in LAMB_SHAPES.items()
    }
    starts = {name: parameter.detach().double().numpy().copy() for name, parameter in parameters.items()}
    gradients = [
        {name: (scale * torch.randn(shape, generator=generator)).to(dtype) for name, shape in LAMB_SHAPES.items()}
        for scale in (1.0, 0.25, 8.0, 0.01)
    ]
    for gradient in gradients:
        gradient["embedding"][3] = 0.0  # a piece that no transcript has: 0 / (0 + epsilon)
    optimizer = Optimizer(
        [ParameterGroup(parameters, weight_decay=1e-3, trust_ratio=True)], LAMB(0.9, 0.999, 1e-9), rate_table(RATES),
        Layout(), grad_divisor=DIVISOR, clip=ClipNorm(1.0, "after_reduction"),
    )  # fmt: skip
    clipped: list[dict[str, np.ndarray]] = []
    for gradient in gradients:
        optimizer.begin()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad.add_(gradient[name])
        optimizer.arm()
        optimizer.collect()
        assert not apply_gradients([optimizer], torch.tensor(0.0))
        mean = {name: value.double().numpy() / DIVISOR for name, value in gradient.items()}
        norm = np.sqrt(sum(np.square(value).sum() for value in mean.values()))
        clipped.append({name: value * min(1.0, 1.0 / (norm + 1e-6)) for name, value in mean.items()})
    norms = [np.sqrt(sum(np.square(value).sum() for value in mean.values())) for mean in clipped]
    assert norms[0] == pytest.approx(1.0, abs=1e-5), "some are clipped"
    assert norms[3] < 0.5, "and some are not"
    found = optimizer.state_dict().get("masters") or {name: p.detach() for name, p in parameters.items()}
    for name, start in starts.items():
        knobs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-9, "weight_decay": 1e-3}
        expected, _, _ = lamb_steps(start, [mean[name] for mean in clipped], RATES, **knobs)
        np.testing.assert_allclose(found[name].double().numpy(), expected, rtol=rtol, atol=rtol * 0.1, err_msg=name)
