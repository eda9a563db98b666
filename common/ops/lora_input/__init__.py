"""The input of a low-rank adapter: dropout in front of it, and its gradient's way back past the dropout.

An adapter adds ``s B A drop(x)`` to ``W x`` (Hu et al., arXiv:2106.09685, section 4.1), with the dropout in its branch
alone. The mask's element of row t and column c has index ``rows[t] * columns_total + column_offset + c``; see
:mod:`common.ops.dropout`. With the numbers of rows and columns in the whole tensor, every split of it over ranks has
the same mask. Nothing is stored: backward makes ``drop(x)`` again, from the norm's input where x was a norm's result.
The functions work without autograd.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.lora_input.plain import LoraInput, add_input_gradient_torch, dropped_norm_torch, dropped_torch
from common.ops.triton_support import triton_unsupported


def _dropped_triton(*args: Any) -> Tensor:
    from common.ops.lora_input import triton  # triton is imported only where it is used

    return triton.dropped(*args)


def _dropped_norm_triton(*args: Any) -> Tensor:
    from common.ops.lora_input import triton  # triton is imported only where it is used

    return triton.dropped_norm(*args)


def _add_input_gradient_triton(*args: Any) -> Tensor:
    from common.ops.lora_input import triton  # triton is imported only where it is used

    return triton.add_input_gradient(*args)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton", LoraInput(_dropped_triton, _dropped_norm_triton, _add_input_gradient_triton), triton_unsupported
    ),
    "torch": Implementation("torch", LoraInput(dropped_torch, dropped_norm_torch, add_input_gradient_torch), always),
}
"""Functions: :class:`LoraInput`."""

KERNEL_NAMES = (("LoRA dropout", r"^lora_input_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
