"""Loss of a recurrent transducer (Graves 2012) on packed rows, with the joint network's last layer before it.

At row (b, s, u), frame s after u tokens, the softmax over the logits gives the arc to (s + 1, u) the probability of
blank, the last class, and the arc to (s, u + 1) that of the next token. The loss is minus the logarithm of the sum
over all paths from (0, 0) that leave (S - 1, U) by blank. Let alpha and beta be the logarithms of the sums over all
paths to a row, and from it to the end. The occupancy of an arc, which is its share of the paths, is ``exp(alpha + arc
+ beta after it - beta(0, 0))``. A row's logits have the gradient ``softmax * (occupancy of both arcs) - occupancies
at blank and label``, so backward needs only logits and occupancies.

An implementation consists of passes without autograd; :mod:`benchmarks.rnnt.ops.transducer_loss.passes` adds
autograd.

Shapes: S frames, U tokens, B utterances, H width of the joint network, V classes, R rows.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.transducer_loss.passes import LossPasses, joint_loss
from benchmarks.rnnt.ops.transducer_loss.reference import PASSES
from common.ops.operation import Operation
from common.ops.triton_support import HALVES, triton_kernels

__all__ = ["TRANSDUCER_LOSS", "LossPasses", "joint_loss"]

MOST_CLASSES = 8192
"""Maximum classes, because a program keeps a whole row of logits in registers."""

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
    former=dict.fromkeys(("sparse", "fused", "library"), "triton"),
    cases="benchmarks.rnnt.ops.transducer_loss.cases",
)
"""Functions: :class:`LossPasses`. Sizes of a request: ``classes``, ``width``."""
