"""LSTM of PyTorch: cuDNN on a GPU, a C++ loop on a CPU.

cuDNN runs a layer in one persistent kernel if PyTorch requests it (``get_algo`` in its ``cudnn/RNN.cpp``): fp16, one
layer per call, input and width multiples of 128, width at most 1,024, batch a multiple of 8 up to 128. Otherwise it
runs a matrix product and a kernel for the gates at every frame, over all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rnnt.ops.lstm.reference import LstmWeights, check
from common.ops.operation import OperationRequest


def unsupported(request: OperationRequest) -> str | None:
    """Return why PyTorch's LSTM cannot serve a request; None if it can."""
    if request.device.type == "cpu" and request.dtype == torch.bfloat16:
        return "PyTorch's gradients of a wide layer in bf16 are wrong on CPUs"
    return None


def lstm_library(x_TBI: Tensor, weights: LstmWeights, lengths_B: Tensor) -> Tensor:
    """See :func:`benchmarks.rnnt.ops.lstm.reference.lstm_reference`.

    Padding after the end of a row is computed too, and the result is replaced by zeros.

    Raises:
        ValueError: the shapes do not match.
    """
    check(x_TBI, weights, lengths_B)
    frames, batch = x_TBI.shape[:2]
    there_TB1 = (torch.arange(frames, device=x_TBI.device).unsqueeze(1) < lengths_B).unsqueeze(2)
    start_1BH = x_TBI.new_zeros(1, batch, weights.width)
    y_TBH, _, _ = torch._VF.lstm(
        x_TBI, [start_1BH, start_1BH], list(weights), True, 1, 0.0, torch.is_grad_enabled(), False, False
    )
    return torch.where(there_TB1, y_TBH, 0.0)
