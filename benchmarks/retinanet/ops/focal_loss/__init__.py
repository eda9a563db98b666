"""Sigmoid focal loss of one level of the pyramid, with its gradient from the same pass.

    loss = sum over pictures n of weight[n] * sum over anchors, classes of a_t (1 - p_t)^gamma * -log p_t

p is the sigmoid of logit plus bias. For the class of the anchor, p_t = p and a_t = alpha; for all other classes, p_t =
1 - p and a_t = 1 - alpha (Lin et al., arXiv:1708.02002, section 3). Ignored anchors have neither loss nor gradient,
whatever their logits are.

In channels_last memory, the output of the classifier's convolution has one row of K logits per anchor, so that levels
are not permuted, copied or concatenated. The bias is added here; its gradient is the column sums of the logits'
gradient.

The gradient is multiplied by the loss scale before it is rounded, because that of most negatives, about 5e-8, is below
the smallest number of fp16. The loss must therefore be differentiated with exactly this scale as incoming gradient.
Otherwise the gradient of the bias is NaN.
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
