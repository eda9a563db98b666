"""Gradients that a backward pass adds to a parameter's own, where autograd would first write a tensor of its own.

The product that makes a weight's gradient can add to what micro-batches before have left
(:mod:`common.ops.weight_gradient`). So the weight is no input of the autograd function, and the function adds to
``.grad``; as autograd does not see that, :func:`finish` calls what is to happen once a gradient is accumulated, such as
the reduction of a bucket over the ranks.

A parameter's gradient may be in another dtype than the parameter: in that of its ``grad_dtype``, such as fp32 of a bf16
weight (``gradients`` of :class:`common.optim.optimizer.Optimizer`). Everything here adds to either.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def main_gradient(parameter: nn.Parameter) -> Tensor:
    """Where gradients of ``parameter`` add up: its ``.grad``, which is made of zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=dtype_of(parameter))
    return parameter.grad


def dtype_of(parameter: Tensor) -> torch.dtype:
    """In which gradients of ``parameter`` add up."""
    return parameter.grad_dtype or parameter.dtype


def finish(parameter: nn.Parameter) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook``: this backward pass has added all that it will.

    Call it on the stream that the gradient was added on, once for each parameter and backward pass.
    """
    hooks = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


def add_(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add ``gradient``, of any floating dtype, and finish."""
    main_gradient(parameter).add_(gradient)
    finish(parameter)
