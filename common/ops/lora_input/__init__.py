"""Dropout in front of a low-rank adapter (LoRA), and the backward pass through this dropout.

An adapter adds ``s B A drop(x)`` to ``W x`` (Hu et al., arXiv:2106.09685, section 4.1); the dropout is only in its
branch. The mask element of row t and column c has index ``rows[t] * columns_total + column_offset + c``; see
:mod:`common.ops.dropout`. Rows and columns are counted in the whole tensor, so the mask does not depend on how ranks
shard it. Nothing is stored: backward computes ``drop(x)`` again, from the input of the norm if x is the result of a
norm. The functions work without autograd.
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
