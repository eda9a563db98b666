"""Cross-entropy of every default box's class, and the offsets beside it, from the results of the heads as they lie.

``-log softmax(logits)[class]``. The heads' results hold the logits of a default box behind one another, so that no
level is joined with another and the logits are never copied in fp32: a pass reads them, and one backward reads them
again and writes the gradient where the convolution takes it from.
"""

from __future__ import annotations

from benchmarks.ssd300.ops.class_entropy.reference import class_entropy_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

CLASS_ENTROPY = Operation(
    "class_entropy",
    class_entropy_reference,
    {
        "triton": triton_kernels("benchmarks.ssd300.ops.class_entropy.triton:class_entropy"),
    },
    kernel_names=(("cross-entropy", r"^class_entropy_"),),
    cases="benchmarks.ssd300.ops.class_entropy.cases",
)
"""Signature: ``class_entropy(channels, results, class_NA)``."""
