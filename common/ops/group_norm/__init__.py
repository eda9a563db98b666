"""Group norm over channels_last pictures, then SiLU: what stands in front of the convolutions of a latent U-Net.

Mean and variance (biased) are those of one group of channels of one sample (Wu, He, arXiv:1803.08494, section 3.1), in
fp32 whatever the activations are.

It reads what others would have to write first. A pair of inputs stands for their concatenation, as of a skip connection
(a group may straddle both). ``added`` is a value for every channel of a sample, such as the bias of the convolution
before and the embedding of time. The result of ``keep`` hands the inputs on, to the residual connection or its 1x1
shortcut, so that backward adds the gradient that comes from there where it writes that of the input.
"""

from __future__ import annotations

from common.ops.group_norm import apex
from common.ops.group_norm.reference import group_norm_reference
from common.ops.operation import Implementation, Operation
from common.ops.triton_support import triton_kernels

GROUP_NORM = Operation(
    "group_norm",
    group_norm_reference,
    {
        "triton": triton_kernels("common.ops.group_norm.triton:group_norm"),
        "apex": Implementation(apex.group_norm_apex, apex.unsupported),
    },
    kernel_names=(("group norm", r"^group_norm_|^moments_kernel|group_norm_nhwc"),),
    cases="common.ops.group_norm.cases",
)
"""Signature: ``group_norm(inputs, weight_C, bias_C, groups, eps, *, silu, added_NC=None, keep=False)``. A request says
``channels`` and ``groups``, and ``inputs`` and ``added`` where they are not 1 and 0."""
