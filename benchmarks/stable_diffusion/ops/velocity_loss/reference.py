"""The reference of :mod:`benchmarks.stable_diffusion.ops.velocity_loss`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


def velocity_loss_reference(prediction_NCHW: Tensor, target_NCHW: Tensor) -> Tensor:
    """Reference implementation.

    Args:
        prediction_NCHW: of the network.
        target_NCHW: fp32 (fp64 of fp64), without a gradient.

    Returns:
        The loss, 0-d fp32 (fp64 of fp64).

    Raises:
        ValueError: the shapes differ.
    """
    check(prediction_NCHW, target_NCHW)
    return F.mse_loss(widen(prediction_NCHW), widen(target_NCHW))


def check(prediction_NCHW: Tensor, target_NCHW: Tensor) -> None:
    """Refuse shapes that would broadcast.

    Raises:
        ValueError: they differ.
    """
    if prediction_NCHW.shape != target_NCHW.shape:
        raise ValueError(f"a prediction of {tuple(prediction_NCHW.shape)} for a target of {tuple(target_NCHW.shape)}")
