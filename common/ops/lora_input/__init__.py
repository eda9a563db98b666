"""The input of a low-rank adapter: dropout in front of it, and its gradient's way back past the dropout.

An adapter adds ``s B A drop(x)`` to ``W x`` (Hu et al., arXiv:2106.09685, section 4.1), with the dropout in its branch
alone. The mask's element of row t and column c has index ``rows[t] * columns_total + column_offset + c``; see
:mod:`common.ops.dropout`. With the numbers of rows and columns in the whole tensor, every split of it over ranks has
the same mask. Nothing is stored: backward makes ``drop(x)`` again, from the norm's input where x was a norm's result.
The functions work without autograd.
"""

from __future__ import annotations

from common.ops.lora_input.reference import (
    LoraInput,
    add_input_gradient_reference,
    dropped_norm_reference,
    dropped_reference,
)
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

LORA_INPUT = Operation(
    "lora_input",
    LoraInput(dropped_reference, dropped_norm_reference, add_input_gradient_reference),
    {
        "triton": triton_kernels("common.ops.lora_input.triton"),
    },
    kernel_names=(("LoRA dropout", r"^lora_input_"),),
    cases="common.ops.lora_input.cases",
)
"""Functions: :class:`LoraInput`."""
