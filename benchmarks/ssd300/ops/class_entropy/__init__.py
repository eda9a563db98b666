"""Cross-entropy of every default box's class, and the offsets beside it, from the results of the heads as they lie.

``-log softmax(logits)[class]``. The heads' results hold the logits of a default box behind one another, so that no
level is joined with another and the logits are never copied in fp32: a pass reads them, and one backward reads them
again and writes the gradient where the convolution takes it from.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.ssd300.ops.class_entropy.plain import class_entropy_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _class_entropy_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # triton is imported only where it is used
    from benchmarks.ssd300.ops.class_entropy.triton import class_entropy

    return class_entropy(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _class_entropy_triton, triton_unsupported),
    "torch": Implementation("torch", class_entropy_torch, always),
}
"""Signature: ``class_entropy(channels, results, class_NA)``."""

KERNEL_NAMES = (("cross-entropy", r"^class_entropy_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
