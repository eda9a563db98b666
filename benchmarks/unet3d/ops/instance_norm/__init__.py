"""Instance normalisation with scale and shift, then ReLU; it follows every 3x3x3 convolution of the network.

Mean and (biased) variance are those of one channel of one sample over its whole volume, in training and evaluation:
there are no running statistics (Ulyanov et al., arXiv:1607.08022). Variances are sums about the mean, never E[x^2] -
E[x]^2, because convolutions without bias can have means much larger than the standard deviation.

The result is returned twice, one for the next block and one for a skip connection. Backward then receives two
gradients and adds them while it reads. If there is only one reader, the second result is unused.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.spatial.split import VolumeSplit
from common.ops.norm.autograd import SumOverRanks
from common.ops.operation import Implementation, Operation
from common.ops.triton_support import triton_kernels, widen

_VOLUME = (2, 3, 4)


def whole_volume(x_NCDHW: Tensor, split: VolumeSplit | None) -> int:
    """Return the voxels of a sample's whole volume.

    Raises:
        ValueError: the volume has a single voxel and thus no variance.
    """
    voxels = x_NCDHW[0, 0].numel() * (1 if split is None else split.ranks)
    if voxels == 1:
        raise ValueError(f"instance norm over a single voxel, input {tuple(x_NCDHW.shape)}: the volume is too small")
    return voxels


def instance_norm_relu_reference(
    x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``relu((x - mean) / sqrt(variance + epsilon) * weight + bias)``.

    Args:
        x_NCDHW: input; this rank's slab if the volume is split.
        weight_C, bias_C: scale and shift, in the input's dtype or a wider one. As for all parameters, their gradients
            are those of the slab; the sum over the ranks is the whole gradient.
        split: ranks that share each volume.

    Returns:
        The same result twice, one for each of two readers, with shape, dtype and memory format of ``x_NCDHW``.
        Readers must not modify it in place.

    Raises:
        ValueError: the whole volume has a single voxel.
    """
    voxels = whole_volume(x_NCDHW, split)

    def mean(value: Tensor) -> Tensor:
        total = value.sum(_VOLUME, keepdim=True)
        return (total if split is None else SumOverRanks.apply(total, split.sum_)) / voxels

    widened = widen(x_NCDHW)
    centred = widened - mean(widened)
    scale = torch.rsqrt(mean(centred.square()) + epsilon) * weight_C.to(widened.dtype).view(1, -1, 1, 1, 1)
    y_NCDHW = F.relu(centred * scale + bias_C.to(widened.dtype).view(1, -1, 1, 1, 1)).to(x_NCDHW.dtype)
    return y_NCDHW, y_NCDHW


def instance_norm_relu_library(
    x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None = None
) -> tuple[Tensor, Tensor]:
    """Return PyTorch's instance norm, then ReLU. Split volumes use the reference implementation.

    Arguments, result and errors are those of :func:`instance_norm_relu_reference`.
    """
    if split is not None and split.ranks > 1:
        return instance_norm_relu_reference(x_NCDHW, weight_C, bias_C, epsilon, split)
    whole_volume(x_NCDHW, None)
    y_NCDHW = F.relu(F.instance_norm(x_NCDHW, weight=weight_C, bias=bias_C, eps=epsilon))
    # PyTorch's result is NCDHW in memory, whatever the input was
    channels_last = x_NCDHW.is_contiguous(memory_format=torch.channels_last_3d) and not x_NCDHW.is_contiguous()
    if channels_last:
        y_NCDHW = y_NCDHW.contiguous(memory_format=torch.channels_last_3d)
    return y_NCDHW, y_NCDHW


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
