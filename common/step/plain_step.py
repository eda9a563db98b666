"""Training iteration in plain PyTorch, for peers: loss, backward and update on the same tensors, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def plain_step(
    loss_of: Callable[..., Tensor], inputs: tuple[Tensor, ...], optimizer: torch.optim.Optimizer, compiled: bool
) -> Callable[[], Tensor]:
    """Return a function that runs one iteration and returns its loss.

    Args:
        loss_of: returns the loss of ``inputs``.
        compiled: compile ``loss_of`` with ``max-autotune``, which also captures CUDA graphs.
    """
    forward = torch.compile(loss_of, mode="max-autotune", dynamic=False) if compiled else loss_of

    def step() -> Tensor:
        loss = forward(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
