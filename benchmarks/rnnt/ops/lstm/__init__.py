"""One layer of an LSTM over rows of different lengths, forward in time.

Hochreiter & Schmidhuber, 1997, with the forget gate of Gers et al., 2000, and two biases, as cuDNN and
``torch.nn.LSTM`` have it. With σ the logistic function::

    i, f, g, o = x_t W_ih^T + b_ih + h_(t-1) W_hh^T + b_hh
    c_t = σ(f) c_(t-1) + σ(i) tanh(g)
    h_t = σ(o) tanh(c_t)

What a row has behind its length is not computed, or computed and thrown away: the result is 0 there, and whatever
gradient arrives there is ignored.

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
