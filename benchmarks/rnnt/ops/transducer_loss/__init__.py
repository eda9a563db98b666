"""The loss of a recurrent transducer (Graves 2012) on packed rows, and the joint network's last layer in front of it.

At row (b, s, u), frame s after u tokens, the softmax over the logits gives the arc to (s + 1, u) the probability of
blank, the last class, and that to (s, u + 1) the probability of the next token. The loss is minus the logarithm of the
sum over all ways from (0, 0) out of (S - 1, U) by blank. With alpha and beta the logarithms of the sums over all ways
to a row and from it to the end, an arc's share of the ways is exp(alpha + arc + beta behind it - beta(0, 0)). A row's
logits have the gradient ``softmax * (share of both arcs) - shares at blank and label``, which is all that backward
needs beside them.

Works without autograd, in passes; :mod:`benchmarks.rnnt.ops.transducer_loss.passes` has it around them.

Legend: S frames, U tokens, B utterances, H width of the joint network, V classes, R rows.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.transducer_loss.passes import LossPasses, joint_loss, packed_loss
from benchmarks.rnnt.ops.transducer_loss.plain import PASSES
from common.ops.implementation import Implementation, always

__all__ = ["IMPLEMENTATIONS", "LossPasses", "joint_loss", "packed_loss"]

IMPLEMENTATIONS = {
    "torch": Implementation("torch", PASSES, always),
}
"""Functions: :class:`LossPasses`."""

KERNEL_NAMES = (("transducer loss", r"^transducer_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
