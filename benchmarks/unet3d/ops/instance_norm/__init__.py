"""Instance normalisation with scale and shift, then ReLU; it follows every 3x3x3 convolution of the network.

Mean and (biased) variance are those of one channel of one sample over its whole volume, in training and evaluation:
there are no running statistics (Ulyanov et al., arXiv:1607.08022). Variances are sums about the mean, never E[x^2] -
E[x]^2, because convolutions without bias can have means much larger than the standard deviation.

The result is returned twice, one for the next block and one for a skip connection. Backward then receives two
gradients and adds them while it reads. If there is only one reader, the second result is unused.
"""

from __future__ import annotations

from benchmarks.unet3d.ops.instance_norm.reference import instance_norm_relu_library, instance_norm_relu_reference
from common.ops.operation import Implementation, Operation
from common.ops.triton_support import triton_kernels

INSTANCE_NORM = Operation(
    "instance_norm",
    instance_norm_relu_reference,
    {
        "triton": triton_kernels("benchmarks.unet3d.ops.instance_norm.triton:instance_norm_relu"),
        "library": Implementation(instance_norm_relu_library),
    },
    kernel_names=(
        ("batch or instance norm", r"^(slab_)?(moments|statistics|normalise|gradient_sums|input_gradient)_kernel"),
        ("batch or instance norm", r"^(sums_kernel|small_forward_kernel|small_backward_kernel)"),
    ),
    former={"torch": "library"},
    cases="benchmarks.unet3d.ops.instance_norm.cases",
)
"""Signature: ``instance_norm_relu(x_NCDHW, weight_C, bias_C, epsilon, split=None)``, which returns the result twice."""
