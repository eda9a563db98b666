"""Sigmoid focal loss of one level of the pyramid, with its gradient from the same pass.

    loss = sum over pictures n of weight[n] * sum over anchors, classes of a_t (1 - p_t)^gamma * -log p_t

with p the sigmoid of logit plus bias, t whether the class is the anchor's, p_t = p and a_t = alpha where it is, 1 - p
and 1 - alpha where it is not (Lin et al., arXiv:1708.02002, section 3). Anchors that are ignored have no loss and no
gradient, whatever their logits are.

The classifier's convolution gives (N, H W anchors of a cell * K) rows in channels_last memory, which is one row of K
logits an anchor: no level is permuted, copied or joined with another. Its bias is added here, and the bias's gradient
is the column sums of the pass that writes the logits' gradient.

The gradient is multiplied by the loss scale before it is rounded: that of most negatives, about 5e-8, is below fp16's
smallest number. So the loss must be differentiated with exactly this scale as the gradient that comes in, and a bias
whose gradient is NaN says that it was not.
"""

from __future__ import annotations

from benchmarks.retinanet.ops.focal_loss.reference import focal_loss_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

FOCAL_LOSS = Operation(
    "focal_loss",
    focal_loss_reference,
    {
        "triton": triton_kernels("benchmarks.retinanet.ops.focal_loss.triton:focal_loss"),
    },
    kernel_names=(("focal loss", r"^focal_loss_"),),
    cases="benchmarks.retinanet.ops.focal_loss.cases",
)
"""Signature: ``focal_loss(logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)``."""
