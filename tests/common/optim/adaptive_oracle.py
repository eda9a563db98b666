"""LAMB in float64 NumPy, one tensor at a time, and shards built by hand for the tests of the rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.optim.buffers import Fragment, Shard
from common.optim.rules import Binding, GroupSettings, Rule, Update

RATES = [0.05, 0.1, 0.2, 0.15, 0.025]
SHAPES = [(200, 49), (7,), (65, 3), (64,)]
"""Shapes of tensors. 9,800 elements need three blocks; 7 and 195 leave padding."""

TOLERANCE = {torch.float64: (1e-12, 1e-14), torch.float32: (2e-5, 2e-6)}
"""Relative and absolute tolerance, by the dtype of the masters."""

STATE = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Weights, first moment, second moment."""


def lamb_steps(
    weight: np.ndarray,
    gradients: Sequence[np.ndarray],
    rates: Sequence[float],
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    trust: bool = True,
    bias_correction: bool = True,
    norm_dtype: type = np.float64,
) -> STATE:
    """Return the state after one step for each gradient (You et al., 2020, algorithm 2, with phi(z) = z)."""
    x = weight.astype(np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = gradient.astype(np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t) if bias_correction else m
        v_hat = v / (1 - beta2**t) if bias_correction else v
        update = m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay * x
        ratio = 1.0
        if trust:
            norm_of_x = np.linalg.norm(x.astype(norm_dtype).astype(np.float64))
            norm_of_update = np.linalg.norm(update)
            if norm_of_x > 0 and norm_of_update > 0:
                ratio = norm_of_x / norm_of_update
        x = x - rate * ratio * update
    return x, m, v


def group(
    weight_decay: float = 0.0,
    trust: bool = False,
    grad_multiplier: float = 1.0,
    share: float = 1.0,
) -> GroupSettings:
    """Return the settings of a parameter group."""
    return GroupSettings(grad_multiplier, weight_decay, trust, False, share)


@dataclass(frozen=True)
class Problem:
    """A shard with all tensors, aligned, and the update rule bound to it."""

    shard: Shard
    update: Update

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Set the gradient of each tensor, rounded to the dtype of the shard."""
        for fragment, gradient in zip(self.shard.fragments, gradients, strict=True):
            self.shard.gradients[fragment.start : fragment.start + fragment.numel] = gradient.flatten()

    def apply(self, rate: float | Sequence[float], step: int, factor: float = 1.0, write: bool = True) -> None:
        """Apply one update with the current gradients. ``rate`` is for all groups, or has one number for each."""
        dtype = torch.promote_types(self.shard.parameters.dtype, torch.float32)
        groups = 1 + max((fragment.group for fragment in self.shard.fragments), default=0)
        rates_G = torch.tensor(rate if isinstance(rate, Sequence) else [rate] * groups)
        factor_ = torch.tensor(factor, dtype=dtype)
        self.update.apply(rates_G, torch.tensor(step), factor_, torch.tensor(write))

    def measure(self) -> tuple[float, float]:
        """Return the statistics of the rule: whether gradients are not finite, and their sum of squares."""
        stats = torch.zeros(2, dtype=torch.promote_types(self.shard.parameters.dtype, torch.float32))
        self.update.measure(stats)
        return stats[0].item(), stats[1].item()

    def arrays(self, index: int) -> STATE:
        """Return master weights and moments of one tensor in float64."""
        states = self.update.states
        flats = (self.shard.masters, states["exp_avg"][0], states["exp_avg_sq"][0])
        weight, m, v = (self.part(flat, index).double().numpy() for flat in flats)
        return weight, m, v

    def part(self, flat: Tensor, index: int) -> Tensor:
        """Return a copy of one tensor's part of a flat tensor."""
        fragment = self.shard.fragments[index]
        return flat[fragment.start : fragment.start + fragment.numel].clone()

    def snapshot(self) -> list[Tensor]:
        """Return copies of all tensors that an update may write."""
        states = [flat for flats in self.update.states.values() for flat in flats]
        return [t.clone() for t in (self.shard.parameters, self.shard.masters, *states)]


def make_shard(
    tensors: Sequence[Tensor], groups: Sequence[int], dtype: torch.dtype, numbers: Sequence[int] | None = None
) -> Shard:
    """Return a shard of whole tensors. ``numbers`` are the numbers of the tensors; by default 0, 1, ..."""
    fragments, start = [], 0
    for index, tensor in enumerate(tensors):
        stop = start + -(-tensor.numel() // 64) * 64
        number = index if numbers is None else numbers[index]
        fragments.append(Fragment(number, groups[index], start, tensor.numel(), stop))
        start = stop
    parameters = torch.zeros(start, dtype=dtype)
    for fragment, tensor in zip(fragments, tensors, strict=True):
        parameters[fragment.start : fragment.start + fragment.numel] = tensor.flatten()
    half = dtype in (torch.float16, torch.bfloat16)
    masters = parameters.float() if half else parameters
    return Shard(parameters, torch.zeros_like(parameters), masters, tuple(fragments))


def make_problem(
    rule: Rule,
    tensors: Sequence[Tensor],
    settings: Sequence[GroupSettings],
    groups: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Return ``tensors`` in one shard on one rank. Without ``groups``, each tensor is a group."""
    shard = make_shard(tensors, groups or range(len(tensors)), dtype)
    return Problem(shard, rule.bind(Binding([shard], settings, len(tensors), lambda _: None), "reference"))


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normally distributed values."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[np.ndarray]:
    """Return the tensors, rounded to ``dtype``, as float64 arrays."""
    return [t.to(dtype).double().flatten().numpy() for t in tensors]


def gradients_of(tensors: Sequence[Tensor], steps: int = 5) -> list[list[Tensor]]:
    """Return the gradient of each tensor for each step."""
    return [[noise(*t.shape, seed=100 + 10 * i + s) for i, t in enumerate(tensors)] for s in range(steps)]


def run(
    problem: Problem, gradients: Sequence[Sequence[Tensor]], rates: Sequence[float] = RATES, factor: float = 1.0
) -> None:
    """Apply one update for each step of ``gradients``."""
    for step, (now, rate) in enumerate(zip(gradients, rates, strict=True)):
        problem.set_gradients(now)
        problem.apply(rate, step, factor)


def assert_follows(problem: Problem, index: int, expected: STATE) -> None:
    """Check master weights and moments of one tensor."""
    rtol, atol = TOLERANCE[problem.shard.masters.dtype]
    for ours, theirs, name in zip(problem.arrays(index), expected, ("weights", "m", "v"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=f"{name} of tensor {index}")
