"""The training iteration of peers: its losses and updates."""

from __future__ import annotations

import pytest
import torch

from common.step.plain_step import plain_step


def test_an_iteration_returns_the_loss_before_its_update_and_each_gradient_counts_once() -> None:
    weight = torch.tensor(1.0, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    step = plain_step(lambda x: weight.square() * x, (torch.tensor(0.25),), optimizer, compiled=False)
    # the gradient is w / 2, so w becomes 3/4 w
    assert [float(step()) for _ in range(3)] == pytest.approx([1 / 4, 9 / 64, 81 / 1024])
    assert weight.item() == pytest.approx(27 / 64)
