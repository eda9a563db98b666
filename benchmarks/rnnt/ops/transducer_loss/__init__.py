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

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.rnnt.ops.transducer_loss.passes import LossPasses, joint_loss, packed_loss
from benchmarks.rnnt.ops.transducer_loss.plain import PASSES
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "LossPasses", "joint_loss", "packed_loss"]

MOST_CLASSES = 8192
"""What a program holds of a row's logits at once."""


def _unsupported(request: OperationRequest) -> str | None:
    classes, width = request.sizes["classes"], request.sizes["width"]
    if classes > MOST_CLASSES:
        return f"{classes} classes are more than {MOST_CLASSES}"
    if classes % 8 or width % 8:
        return f"classes and width are multiples of 8, not {classes} and {width}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"the products are of fp16 or bf16, not {request.dtype}"
    return triton_unsupported(request)


def _of_triton(implementation: str, name: str) -> Callable[..., Any]:
    """A pass, which imports triton only where it is used."""

    def run(*args: Any) -> Any:
        from benchmarks.rnnt.ops.transducer_loss import triton

        return getattr(getattr(triton, implementation), name)(*args)

    return run


def _passes(implementation: str) -> LossPasses:
    return LossPasses(*(_of_triton(implementation, name) for name in LossPasses._fields))


IMPLEMENTATIONS = {
    "sparse": Implementation("sparse", _passes("SPARSE"), _unsupported),
    "fused": Implementation("fused", _passes("FUSED"), _unsupported),
    "library": Implementation("library", _passes("LIBRARY"), _unsupported),
    "torch": Implementation("torch", PASSES, always),
}
"""Functions: :class:`LossPasses`. Sizes of a request: ``classes``, ``width``. ``fused`` has products of our own, which
skip rows that do not exist, and ``sparse`` makes gradients of those rows alone where they are not zero: near the ways
that are likely. ``library`` has the products of cuBLAS. Other Triton kernels are the same in all three."""

KERNEL_NAMES = (
    ("joint products", r"^transducer_(product|(input|weight)_gradient)"),
    ("transducer loss", r"^transducer_"),
)
"""Kinds of work and patterns of the kernels' names, for the breakdown of a step."""
