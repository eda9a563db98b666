"""One forward-in-time LSTM layer over rows of different lengths.

Hochreiter & Schmidhuber, 1997, with the forget gate of Gers et al., 2000, and two biases, like cuDNN and
``torch.nn.LSTM``. With σ the logistic function::

    i, f, g, o = x_t W_ih^T + b_ih + h_(t-1) W_hh^T + b_hh
    c_t = σ(f) c_(t-1) + σ(i) tanh(g)
    h_t = σ(o) tanh(c_t)

Beyond the length of a row, the result is 0 and its gradient is ignored, whether or not these frames are computed.

Shapes: T frames, B rows, I inputs, H width of the state, G = 4 H gates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rnnt.ops.lstm import persistent
from benchmarks.rnnt.ops.lstm.persistent import lstm_persistent
from benchmarks.rnnt.ops.lstm.reference import LstmWeights, check, lstm_reference
from common.ops.operation import Implementation, Operation, OperationRequest


def _library_unsupported(request: OperationRequest) -> str | None:
    if request.device.type == "cpu" and request.dtype == torch.bfloat16:
        return "PyTorch's gradients of a wide layer in bf16 are wrong on CPUs"
    return None


def lstm_library(x_TBI: Tensor, weights: LstmWeights, lengths_B: Tensor) -> Tensor:
    """Compute :func:`benchmarks.rnnt.ops.lstm.reference.lstm_reference` by PyTorch: cuDNN, or a C++ loop on a CPU.

    cuDNN runs a layer in one persistent kernel if PyTorch requests it (``get_algo`` in its ``cudnn/RNN.cpp``): fp16,
    input and width multiples of 128, width at most 1,024, batch a multiple of 8 up to 128. Otherwise it runs a matrix
    product and a kernel for the gates at every frame. Padding is computed too, and replaced by zeros.

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


LSTM = Operation(
    "lstm",
    lstm_reference,
    {
        "persistent": Implementation(lstm_persistent, persistent.unsupported),
        "library": Implementation(lstm_library, _library_unsupported),
    },
    kernel_names=(("LSTM recurrence", r"^lstm_recurrence_|^RNN_|LSTM_elementWise|^persist"),),
    former={"torch": "library"},
    cases="benchmarks.rnnt.ops.lstm.cases",
)
"""Signature: ``lstm(x_TBI, weights, lengths_B) -> y_TBH``. Sizes of a request: ``inputs`` and ``width``."""
