"""Momentum updates in float64 NumPy, one tensor at a time, and small builders that the optimizer tests share."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.rules import Rule
from common.step.train_step import apply_gradients

NO_SKIP = 0.0


def momentum_steps(
    weight: np.ndarray,
    gradients: Sequence[np.ndarray],
    rates: Sequence[float],
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust: bool = False,
    inside: bool = True,
    nesterov: bool = False,
    eta: float = 0.001,
    epsilon: float = 0.0,
    norm_dtype: type = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and momentum after one step for each gradient."""
    weight = weight.astype(np.float64)
    buffer = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        gradient = gradient.astype(np.float64)
        ratio = 1.0
        if trust:
            weight_norm = np.sqrt((weight.astype(norm_dtype).astype(np.float64) ** 2).sum())
            gradient_norm = np.sqrt((gradient**2).sum())
            if weight_norm > 0 and gradient_norm > 0:
                ratio = eta * weight_norm / (gradient_norm + weight_decay * weight_norm + epsilon)
        direction = ratio * (gradient + weight_decay * weight)
        if inside:
            buffer = momentum * buffer - rate * direction
            weight = weight + (momentum * buffer - rate * direction if nesterov else buffer)
        else:
            buffer = momentum * buffer + direction
            weight = weight - rate * (momentum * buffer + direction if nesterov else buffer)
    return weight, buffer


def rate_table(rates: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Return a schedule that gives ``rates`` one after another."""
    table = torch.tensor(rates, dtype=torch.float32)
    return lambda step: table[step]


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter of normally distributed values."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(noise.to(dtype))


def noise(steps: int, *shape: int, seed: int = 100) -> list[Tensor]:
    """Return one gradient for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


def build(
    groups: Sequence[ParameterGroup],
    rule: Rule,
    rates: Sequence[float],
    implementation: str = "reference",
    grad_divisor: float = 1.0,
) -> Optimizer:
    """Return an optimizer on one rank."""
    return Optimizer(
        groups, rule, rate_table(rates), Layout(), grad_divisor=grad_divisor, implementation=implementation
    )


def step(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor], skip: float = NO_SKIP) -> bool:
    """Run one step with given gradients, and return whether one of them is not finite."""
    optimizer.begin()
    for p, gradient in gradients.items():
        assert p.grad is not None
        p.grad.copy_(gradient)
    optimizer.arm()
    return bool(apply_gradients([optimizer], torch.tensor(skip)))


def step_beside(
    optimizer: Optimizer,
    ours: nn.Parameter,
    reference: torch.optim.Optimizer,
    theirs: nn.Parameter,
    rates: Sequence[float],
) -> None:
    """Run one step of both optimizers for each rate with the same gradients, and check that the float64 weights are
    equal."""
    for gradient, rate in zip(noise(len(rates), *ours.shape), rates, strict=True):
        step(optimizer, {ours: gradient})
        theirs.grad = gradient.double()
        reference.param_groups[0]["lr"] = rate
        reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-14, atol=1e-14)


def momentum_of(optimizer: Optimizer, name: str) -> np.ndarray:
    """Return the momentum of one parameter in float64."""
    return optimizer.state_dict()["momentum"][name].double().numpy()


def snapshot(optimizer: Optimizer, *parameters: nn.Parameter) -> list[Tensor]:
    """Return copies of all tensors that an update may write."""
    return [p.detach().clone() for p in parameters] + [t.clone() for _, t in optimizer.named_state()]
