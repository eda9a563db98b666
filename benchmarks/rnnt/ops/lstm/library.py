"""LSTM through PyTorch's own: cuDNN's on a GPU, and PyTorch's own loop in C++ on a CPU.

cuDNN runs a layer in one persistent kernel where PyTorch asks for it (``get_algo`` in its ``cudnn/RNN.cpp``): fp16, one
layer a call, input and width multiples of 128, at most 1,024 wide, a batch that is a multiple of 8 up to 128. Elsewhere
it runs a product and a kernel for the gates at every frame, over all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rnnt.ops.lstm.plain import GATES, LstmWeights, State, check
from common.ops.implementation import OperationRequest

_SHUT = 1e4
"""A gate's input that is 0 or 1 after the sigmoid in every dtype, and far from the end of fp16."""


def unsupported(request: OperationRequest) -> str | None:
    """Why PyTorch's own can't serve a request; None if it can."""
    if request.device.type == "cpu" and request.dtype == torch.bfloat16:
        return "PyTorch's gradients of a wide layer in bf16 are wrong on CPUs"
    return None


def lstm_library(
    x_TBI: Tensor, weights: LstmWeights, lengths_B: Tensor, state: State | None = None, final_state: bool = False
) -> tuple[Tensor, State | None]:
    """See :func:`benchmarks.rnnt.ops.lstm.plain.lstm_plain`.

    A row that has ended runs on through zeros that nobody sees. Where its final state is wanted an input more shuts the
    input gate and opens the forget gate behind the row's end, so that the cell state stays, bit for bit.

    Raises:
        ValueError: the shapes don't fit.
    """
    check(x_TBI, weights, lengths_B, state)
    frames, batch = x_TBI.shape[:2]
    there_TB1 = (torch.arange(frames, device=x_TBI.device).unsqueeze(1) < lengths_B).unsqueeze(2)
    start = state or (x_TBI.new_zeros(batch, weights.width),) * 2
    stop = final_state and frames > 1
    if stop:
        x_TBI, weights = _stopping(x_TBI, weights, there_TB1)
    y_TBH, _, last_c_1BH = torch._VF.lstm(
        x_TBI, [tensor.unsqueeze(0) for tensor in start], list(weights), True, 1, 0.0, torch.is_grad_enabled(), False,
        False,
    )  # fmt: skip
    last = None
    if final_state:
        last_c_BH = last_c_1BH.squeeze(0)
        began_B1 = (lengths_B > 0).unsqueeze(1)
        at_1BH = (lengths_B.long() - 1).clamp(min=0).view(1, -1, 1).expand(-1, -1, y_TBH.shape[2])
        last_h_BH = torch.where(began_B1, y_TBH.gather(0, at_1BH).squeeze(0), start[0])
        last = last_h_BH, last_c_BH if stop else torch.where(began_B1, last_c_BH, start[1])
    return torch.where(there_TB1, y_TBH, 0.0), last


def _stopping(x_TBI: Tensor, weights: LstmWeights, there_TB1: Tensor) -> tuple[Tensor, LstmWeights]:
    """Input and weights with one column more, which holds the cell state where a row isn't there."""
    gone_TB1 = (~there_TB1).to(x_TBI.dtype)
    column_4H1 = x_TBI.new_zeros(GATES, weights.width, 1)
    column_4H1[0], column_4H1[1] = -_SHUT, _SHUT
    ih_GI = torch.cat([weights.ih_GI, column_4H1.flatten(0, 1)], 1)
    # what a padded frame holds could be anything, even more than the column outweighs
    return torch.cat([torch.where(there_TB1, x_TBI, 0.0), gone_TB1], 2), weights._replace(ih_GI=ih_GI)
