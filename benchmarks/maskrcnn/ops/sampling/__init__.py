"""Which candidates of a picture the losses see: some of those with a box, and others to make up the number.

Girshick, arXiv:1504.08083, section 2.3, and Ren et al., arXiv:1506.01497, section 3.1.3. In the place of a random
permutation each candidate has a key, a hash of the batch's seed, the picture and the candidate
(:mod:`common.ops.random_bits`), and those with the smallest keys are taken: the same ones wherever it is computed.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.sampling.reference import sample_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

SAMPLING = Operation(
    "sampling",
    sample_reference,
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.sampling.triton:sample", dtypes=()),
    },
    kernel_names=(("sampling", r"^sampling_"),),
    cases="benchmarks.maskrcnn.ops.sampling.cases",
)
"""Functions: :func:`sample_reference`. Keys are integers, so all give the same sample."""
