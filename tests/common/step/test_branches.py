"""Gradients of a part that is differentiated early are those of the whole network in its usual order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.step.branches import Branch, cut, early

SCALE = torch.tensor(8.0, dtype=torch.float64)


class Trunk(nn.Module):
    """Two levels that a part and the rest of the network share."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.part, self.rest, self.unused = (
            nn.Parameter(torch.randn((4, 4), generator=generator, dtype=torch.float64)) for _ in range(5)
        )
        self.frozen = torch.ones((4, 4), dtype=torch.float64)

    def levels(self, x: Tensor) -> list[Tensor]:
        low = torch.tanh(x @ self.first)
        return [low, torch.tanh(low @ self.second), x @ self.frozen]

    def losses(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Two losses of the part, which reads a level that needs no gradient too."""
        found = [torch.sin(level @ self.part) for level in levels]
        return found[0].square().mean(), (found[1] * found[2]).mean()

    def loss_of_rest(self, levels: list[Tensor]) -> Tensor:
        return (levels[0] @ self.rest).cos().sum() + levels[1].square().sum()


def x() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def in_order(model: Trunk, weight: float) -> dict[str, Tensor | None]:
    levels = model.levels(x())
    total = model.loss_of_rest(levels) + weight * torch.stack(model.losses(levels)).sum()
    (total * SCALE).backward()
    return gradients(model)


@pytest.mark.parametrize("weight", [1.0, 0.25], ids=["as it is", "with a weight"])
def test_gradients_and_losses_are_those_of_the_usual_order(weight):
    model = Trunk()
    expected = in_order(model, weight)
    expected_losses = [loss.item() for loss in model.losses(model.levels(x()))]

    branch, levels = Branch(torch.device("cpu")), model.levels(x())
    leaves = cut(levels)
    with branch.beside():
        part = early(model.losses(leaves), SCALE, list(zip(levels, leaves, strict=True)), [model.part, model.unused])
    assert all(parameter.grad is None for parameter in model.parameters()), "handed on before its time"
    rest = model.loss_of_rest(levels)
    branch.join()
    ((rest + weight * part.total()) * SCALE).backward()
    found = gradients(model)
    for name, gradient in expected.items():
        if name == "unused":
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=0)
    assert [loss.item() for loss in part.losses] == expected_losses
    assert not any(loss.requires_grad for loss in part.losses)


def test_a_hook_of_a_parameter_sees_the_gradient_when_the_backward_pass_of_the_whole_gets_there():
    model, order = Trunk(), []
    for name in ("part", "rest", "first"):
        getattr(model, name).register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    levels = model.levels(x())
    leaves = cut(levels)
    part = early(model.losses(leaves), SCALE, list(zip(levels, leaves, strict=True)), [model.part])
    assert order == []
    (model.loss_of_rest(levels) + part.total()).backward()
    assert order.count("part") == order.count("rest") == order.count("first") == 1
    assert order[-1] == "first"


def test_two_inputs_with_the_same_gradient_are_each_scaled_once():
    inputs = [x().requires_grad_(), x().requires_grad_()]
    leaves = cut(inputs)
    part = early([(leaves[0] + leaves[1]).sum()], SCALE, list(zip(inputs, leaves, strict=True)), [])
    found = torch.autograd.grad(part.total() * 3.0 * SCALE, inputs)
    assert all(torch.equal(gradient, torch.full_like(gradient, 24.0)) for gradient in found)
