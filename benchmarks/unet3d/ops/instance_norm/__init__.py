"""Instance normalisation with scale and shift, then ReLU: what follows every 3x3x3 convolution of the network.

Mean and variance (biased) are those of one channel of one sample over its whole volume, in training and in evaluation
alike: there are no running statistics (Ulyanov et al., arXiv:1607.08022). Sums over two million voxels are taken about
the mean, never as E[x^2] - E[x]^2: convolutions without bias leave means that are large next to the deviation.

The result is returned twice, so that the next block and a skip connection have one each: backward then gets their two
gradients, and adds them where it reads them. Where there is one reader, the other result is left alone.
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
