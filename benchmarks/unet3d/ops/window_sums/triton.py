"""Launches of the kernels of :mod:`benchmarks.unet3d.ops.window_sums.kernels`; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

from benchmarks.unet3d.ops.window_sums import kernels
from common.ops.triton_support import require_contiguous

_ROWS, _COLUMNS = 16, 128  # 384 columns of the benchmark's windows are three whole blocks
_VOXELS = 4096
_LARGEST_INDEX = 2**31 - 1 - _VOXELS


def add_window(sums_DHWK: Tensor, logits_KDHW: Tensor, importance: Sequence[Tensor]) -> None:
    """See :func:`benchmarks.unet3d.ops.window_sums.reference.add_window_reference`.

    Raises:
        ValueError: W and K of the sums, or an importance, are not contiguous.
    """
    require_contiguous(**dict(zip("DHW", importance, strict=True)))
    depth, height, width, classes = sums_DHWK.shape
    _check_packed(sums_DHWK)
    stride_k, stride_d, stride_h, stride_w = logits_KDHW.stride()
    grid = (triton.cdiv(depth * height, _ROWS), triton.cdiv(width * classes, _COLUMNS))
    kernels.add_window_kernel[grid](
        sums_DHWK, logits_KDHW, *importance, depth * height, sums_DHWK.stride(0), sums_DHWK.stride(1),
        stride_k, stride_d, stride_h, stride_w, H=height, W=width, K=classes,
        PACKED=stride_k == 1 and stride_w == classes, BLOCK_R=_ROWS, BLOCK_C=_COLUMNS, num_warps=8,
    )  # fmt: skip


def count_classes(sums_DHWK: Tensor, label_DHW: Tensor, counts_K3: Tensor) -> None:
    """See :func:`benchmarks.unet3d.ops.window_sums.reference.count_classes_reference`.

    Raises:
        ValueError: W and K of the sums, the label, or the counts are not contiguous, or there are more voxels than a
            32-bit index can tell apart.
    """
    _, height, width, classes = sums_DHWK.shape
    _check_packed(sums_DHWK)
    require_contiguous(labels=label_DHW, counts=counts_K3)
    voxels = label_DHW.numel()
    if voxels > _LARGEST_INDEX:
        raise ValueError(f"{voxels} voxels are more than a 32-bit index can tell apart")
    kernels.count_classes_kernel[(triton.cdiv(voxels, _VOXELS),)](
        sums_DHWK, label_DHW, counts_K3, voxels, sums_DHWK.stride(0), sums_DHWK.stride(1), height, width,
        K=classes, BLOCK=_VOXELS, num_warps=8,
    )  # fmt: skip


def _check_packed(sums_DHWK: Tensor) -> None:
    if sums_DHWK.stride(3) != 1 or sums_DHWK.stride(2) != sums_DHWK.shape[3]:
        raise ValueError(f"sums of strides {sums_DHWK.stride()}: W and K must be contiguous")
