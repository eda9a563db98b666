"""Group norm of channels_last pictures, optionally followed by SiLU, as used in latent U-Nets.

Mean and biased variance are those of one group of channels of one sample (Wu, He, arXiv:1803.08494, section 3.1). They
are in fp32 also for 16-bit activations.

To save memory traffic, the operation includes some of its neighbours:

- It reads a pair of inputs as their concatenation, such as that of a skip connection. A group may span both inputs.
- ``added`` is one value per sample and channel, such as the bias of the previous convolution and the time embedding.
- With ``keep`` it also returns the inputs, for the residual connection or its 1x1 shortcut. The backward pass then
  adds the gradient of these outputs while it writes the gradient of the inputs.
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
"""Signature: ``group_norm(inputs, weight_C, bias_C, groups, eps, *, silu, added_NC=None, keep=False)``. Sizes of a
request: ``channels``, ``groups``, ``inputs`` (default 1) and ``added`` (default 0)."""
