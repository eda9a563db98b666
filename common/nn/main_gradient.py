"""Gradients that a backward pass adds directly to a parameter's ``.grad``, without autograd's separate tensor.

A matrix product can add a weight's gradient to those of earlier micro-batches (:mod:`common.ops.weight_gradient`).
For this, the weight is not an input of the autograd function, and the function adds to ``.grad`` itself. Autograd
does not notice this, so :func:`finish` calls the hooks for an accumulated gradient, for example the reduction of a
bucket.

A gradient may have another dtype than its parameter, namely ``grad_dtype``, such as fp32 for a bf16 weight
(``gradients`` of :class:`common.optim.optimizer.Optimizer`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def main_gradient(parameter: nn.Parameter) -> Tensor:
    """Return ``parameter.grad``; allocate it with zeros if it is None."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=dtype_of(parameter))
    return parameter.grad


def dtype_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which gradients of ``parameter`` are accumulated."""
    return parameter.grad_dtype or parameter.dtype


def finish(parameter: nn.Parameter) -> None:
    """Call the post-accumulate-grad hooks, when this backward pass has added its whole gradient.

    Call this on the stream that added the gradient, once per parameter and backward pass.
    """
    hooks = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


def add_(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add ``gradient``, of any floating dtype, and call :func:`finish`."""
    main_gradient(parameter).add_(gradient)
    finish(parameter)
