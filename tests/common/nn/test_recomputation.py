"""Test that blocks which recompute activations have the same gradients, and what they compute again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from common.nn.recomputation import recomputed
from tests.counted_calls import Calls


class Block(nn.Module):
    """Product, GELU, product with a bias, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, bias=False).double(), nn.Linear(12, 6).double()

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        h = nn.functional.gelu(self.up(x))
        return x + scale * self.down(h), h


def trained(how: dict[str, bool]) -> tuple[list[Tensor], Counter[str]]:
    """Return gradients, and the operators that the backward pass has run."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    y, h = recomputed(block, x, 0.5, **how)
    with Calls() as calls:
        (y.square().sum() + h.sum()).backward()
    gradients = [each.grad for each in (x, *block.parameters())]
    return [gradient for gradient in gradients if gradient is not None], calls.counts


@pytest.mark.parametrize("how", [{}, {"keep_products": True}])
def test_gradients_are_those_of_kept_activations(how):
    found, wanted = trained(how)[0], trained({"recompute": False})[0]
    assert len(found) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_backward_pass_repeats_what_is_not_kept():
    kept, everything, operations = (trained(how)[1] for how in ({"recompute": False}, {}, {"keep_products": True}))
    assert kept["gelu"] == 0
    assert everything["gelu"] == operations["gelu"] == 1
    assert everything["mm"] == kept["mm"] + 1
    assert operations["mm"] == kept["mm"]


def test_without_gradients_a_block_runs_once():
    block, x = Block(), torch.randn(5, 6, dtype=torch.float64)
    with torch.no_grad(), Calls() as calls:
        y, _ = recomputed(block, x, 0.5, keep_products=True)
    assert calls.counts["gelu"] == 1
    assert not y.requires_grad
