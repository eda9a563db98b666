"""The loss of a recurrent transducer (Graves 2012) on packed rows, and the joint network's last layer in front of it.

At row (b, s, u), frame s after u tokens, the softmax over the logits gives the arc to (s + 1, u) the probability of
blank, the last class, and that to (s, u + 1) the probability of the next token. The loss is minus the logarithm of the
sum over all ways from (0, 0) out of (S - 1, U) by blank. With alpha and beta the logarithms of the sums over all ways
to a row and from it to the end, an arc's share of the ways is exp(alpha + arc + beta behind it - beta(0, 0)). A row's
logits have the gradient ``softmax * (share of both arcs) - shares at blank and label``, which is all that backward
needs beside them.

An implementation consists of passes without autograd; :mod:`benchmarks.rnnt.ops.transducer_loss.passes` adds autograd.

Legend: S frames, U tokens, B utterances, H width of the joint network, V classes, R rows.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.transducer_loss.passes import LossPasses, joint_loss
from benchmarks.rnnt.ops.transducer_loss.reference import PASSES
from common.ops.operation import Operation
from common.ops.triton_support import HALVES, triton_kernels

__all__ = ["TRANSDUCER_LOSS", "LossPasses", "joint_loss"]

MOST_CLASSES = 8192
"""What a program holds of a row's logits at once."""


TRANSDUCER_LOSS = Operation(
    "transducer_loss",
    PASSES,
    {
        "triton": triton_kernels(
            "benchmarks.rnnt.ops.transducer_loss.triton",
            most={"classes": MOST_CLASSES},
            multiple_of={"classes": 8, "width": 8},
            dtypes=HALVES,
        )
    },
    kernel_names=(
        ("joint products", r"^transducer_(product|(input|weight)_gradient)"),
        ("transducer loss", r"^transducer_"),
    ),
    former={"sparse": "triton"},
    cases="benchmarks.rnnt.ops.transducer_loss.cases",
)
"""Functions: :class:`LossPasses`. Sizes of a request: ``classes``, ``width``."""
