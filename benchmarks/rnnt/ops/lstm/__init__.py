"""One forward-in-time LSTM layer over rows of different lengths.

Hochreiter & Schmidhuber, 1997, with the forget gate of Gers et al., 2000, and two biases, like cuDNN and
``torch.nn.LSTM``. With σ the logistic function::

    i, f, g, o = x_t W_ih^T + b_ih + h_(t-1) W_hh^T + b_hh
    c_t = σ(f) c_(t-1) + σ(i) tanh(g)
    h_t = σ(o) tanh(c_t)

Beyond the length of a row, the result is 0 and its gradient is ignored, whether or not these frames are computed.

Legend: T frames, B rows, I inputs, H width of the state, G = 4 H gates.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.lstm import library, persistent
from benchmarks.rnnt.ops.lstm.library import lstm_library
from benchmarks.rnnt.ops.lstm.persistent import lstm_persistent
from benchmarks.rnnt.ops.lstm.reference import Lstm, LstmWeights, lstm_reference
from common.ops.operation import Implementation, Operation

__all__ = ["LSTM", "Lstm", "LstmWeights"]

LSTM = Operation(
    "lstm",
    lstm_reference,
    {
        "persistent": Implementation(lstm_persistent, persistent.unsupported),
        "library": Implementation(lstm_library, library.unsupported),
    },
    kernel_names=(("LSTM recurrence", r"^lstm_recurrence_|^RNN_|LSTM_elementWise|^persist"),),
    former={"torch": "library"},
    cases="benchmarks.rnnt.ops.lstm.cases",
)
"""Signature: ``lstm(x_TBI, weights, lengths_B) -> y_TBH``. Sizes of a request: ``inputs`` and ``width``."""
