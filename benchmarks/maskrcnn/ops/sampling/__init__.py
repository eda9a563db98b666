"""Which candidates of a picture the losses see: some of those with a box, and others to make up the number.

Girshick, arXiv:1504.08083, section 2.3, and Ren et al., arXiv:1506.01497, section 3.1.3. In the place of a random
permutation each candidate has a key, a hash of the batch's seed, the picture and the candidate
(:mod:`common.ops.random_bits`), and those with the smallest keys are taken: the same ones wherever it is computed.
"""

from __future__ import annotations

from typing import Any

from benchmarks.maskrcnn.ops.sampling.plain import Sample, sample_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton


def _sample_triton(*args: Any) -> Sample:
    from benchmarks.maskrcnn.ops.sampling.triton import sample  # triton is imported only where it is used

    return sample(*args)


def _triton_unsupported(request: OperationRequest) -> str | None:
    return no_triton(request.device)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _sample_triton, _triton_unsupported),
    "torch": Implementation("torch", sample_torch, always),
}
"""Functions: :func:`sample_torch`. Keys are integers, so all give the same sample."""

KERNEL_NAMES = (("sampling", r"^sampling_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
