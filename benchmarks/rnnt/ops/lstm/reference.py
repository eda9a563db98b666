"""Reference of :mod:`benchmarks.rnnt.ops.lstm`: a loop over the frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen

GATES = 4
"""Number of gates: input, forget, cell and output gate, in this order."""


class LstmWeights(NamedTuple):
    """Parameters of one layer. The rows of the four gates are concatenated, as in ``torch.nn.LSTM``.

    Attributes:
        ih_GI: (4 H, I).
        hh_GH: (4 H, H).
        bias_ih_G, bias_hh_G: (4 H,).
    """

    ih_GI: Tensor
    hh_GH: Tensor
    bias_ih_G: Tensor
    bias_hh_G: Tensor

    @property
    def width(self) -> int:
        """H."""
        return self.hh_GH.shape[1]


Lstm = Callable[[Tensor, LstmWeights, Tensor], Tensor]
"""Signature: ``lstm(x_TBI, weights, lengths_B)``; see :func:`lstm_reference`."""


def check(x_TBI: Tensor, weights: LstmWeights, lengths_B: Tensor) -> None:
    """Check that the arguments match.

    Raises:
        ValueError: shapes or dtypes differ from those of :func:`lstm_reference`, or there is no frame or no row.
    """
    batch, width = x_TBI.shape[1], weights.width
    wanted = {
        "x": (x_TBI, (len(x_TBI), batch, weights.ih_GI.shape[1])),
        "weight_ih": (weights.ih_GI, (GATES * width, weights.ih_GI.shape[1])),
        "weight_hh": (weights.hh_GH, (GATES * width, width)),
        "bias_ih": (weights.bias_ih_G, (GATES * width,)),
        "bias_hh": (weights.bias_hh_G, (GATES * width,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype != x_TBI.dtype:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}: {shape} {x_TBI.dtype} fits the input and the weights"
            )
    if lengths_B.shape != (batch,) or not x_TBI.shape[0] or not batch:
        raise ValueError(f"lengths {tuple(lengths_B.shape)} of an input {tuple(x_TBI.shape)}: one for each of its rows")


def lstm_reference(x_TBI: Tensor, weights: LstmWeights, lengths_B: Tensor) -> Tensor:
    """Compute one layer in fp32 (fp64 for fp64).

    Args:
        weights: parameters, in the dtype of the input.
        lengths_B: frames of each row, 0 ... T, integers on the device.

    Returns:
        The hidden state after each frame, (T, B, H), in the dtype of the input; 0 beyond a row's length, where its
        gradient is ignored.

    Raises:
        ValueError: the shapes do not match.
    """
    check(x_TBI, weights, lengths_B)
    ih_GI, hh_GH, bias_ih_G, bias_hh_G = (widen(weight) for weight in weights)
    gates_TBG = F.linear(widen(x_TBI), ih_GI, bias_ih_G + bias_hh_G)
    h_BH = c_BH = gates_TBG.new_zeros(x_TBI.shape[1], weights.width)
    results = []
    for frame, gates_BG in enumerate(gates_TBG):
        there_B1 = (frame < lengths_B).unsqueeze(1)
        in_BH, forget_BH, cell_BH, out_BH = (gates_BG + F.linear(h_BH, hh_GH)).chunk(GATES, 1)
        c_BH = forget_BH.sigmoid() * c_BH + in_BH.sigmoid() * cell_BH.tanh()
        h_BH = torch.where(there_B1, out_BH.sigmoid() * c_BH.tanh(), 0.0)
        results.append(h_BH)
    return torch.stack(results).to(x_TBI.dtype)
