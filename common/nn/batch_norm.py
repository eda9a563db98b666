"""Batch norm layers on top of the fused operations of :mod:`common.ops.batch_norm`, and a frozen batch norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.nn.frozen import mark_frozen
from common.ops import batch_norm as ops
from common.ops.batch_norm.reference import BatchNormState
from common.ops.operation import OperationRequest


class BatchNorm2d(nn.Module):
    """Batch norm over N, H, W with optional fused ReLU. Parameters are named as in ``torch.nn.BatchNorm2d``.

    Statistics and parameters stay fp32 for every dtype of the activations. There is no ``num_batches_tracked``;
    loading a state removes it.

    Args:
        channels: C.
        relu: whether :meth:`forward` applies ReLU to the result.
        eps: added to the variance.
        momentum: weight of the batch statistics in the update of the running statistics.

    Attributes:
        group: ranks that compute the statistics together (:func:`set_group`); None for this rank alone.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        relu: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.relu = relu
        self.eps = eps
        self.momentum = momentum
        self.group: dist.ProcessGroup | None = None
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self._batch_norm = ops.BATCH_NORM.choice("reference")
        self._add_relu = ops.BATCH_NORM_ADD_RELU.choice("reference")
        self._relu_max_pool = ops.BATCH_NORM_RELU_MAX_POOL.choice("reference")
        self._evaluate = ops.BATCH_NORM_EVALUATE.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"channels": self.weight.numel()})
        self._batch_norm = ops.BATCH_NORM.select(requested, request)
        self._add_relu = ops.BATCH_NORM_ADD_RELU.select(requested, request)
        self._relu_max_pool = ops.BATCH_NORM_RELU_MAX_POOL.select(requested, request)
        self._evaluate = ops.BATCH_NORM_EVALUATE.select(requested, request)
        return self._batch_norm.name

    @property
    def norm(self) -> BatchNormState:
        """Parameters and running statistics in the form that the operations expect."""
        return BatchNormState(self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps)

    def forward(self, x_NCHW: Tensor, moments: Tensor | None = None) -> Tensor:
        """Return ``BN(x)``, or ``relu(BN(x))`` if the layer has ``relu``, in the shape and dtype of ``x_NCHW``.

        ``moments``: second result of :meth:`common.nn.convolution.Conv2d.with_moments`, whose first is ``x_NCHW``.
        """
        if self.training:
            return self._batch_norm.function(x_NCHW, self.norm, relu=self.relu, group=self.group, moments=moments)
        y_NCHW: Tensor = self._evaluate.function(x_NCHW, self.norm, relu=self.relu)
        return y_NCHW

    def add_relu(
        self,
        x_NCHW: Tensor,
        residual_NCHW: Tensor,
        residual_layer: BatchNorm2d | None = None,
        moments: Tensor | None = None,
        residual_moments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``relu(BN(x) + residual)``. ``residual_layer``, if given, normalises the residual first.

        Args:
            moments, residual_moments: moments of ``x_NCHW`` and ``residual_NCHW``, as in :meth:`forward`.

        Returns:
            The same values twice, for the two consumers of a block's output. Do not change either of them in place.
        """
        residual_norm = None if residual_layer is None else residual_layer.norm
        if self.training:
            return self._add_relu.function(
                x_NCHW,
                self.norm,
                residual_NCHW,
                residual_norm,
                group=self.group,
                moments=moments,
                residual_moments=residual_moments,
            )
        y_NCHW = self._evaluate.function(
            x_NCHW, self.norm, relu=True, residual_NCHW=residual_NCHW, residual_norm=residual_norm
        )
        return y_NCHW, y_NCHW

    def relu_max_pool(self, x_NCHW: Tensor) -> Tensor:
        """Return ``max_pool(relu(BN(x)), 3, stride 2, padding 1)``."""
        if self.training:
            return self._relu_max_pool.function(x_NCHW, self.norm, group=self.group)
        return F.max_pool2d(self._evaluate.function(x_NCHW, self.norm, relu=True), 3, stride=2, padding=1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, relu={self.relu}, implementation={self._batch_norm.name}"


def set_group(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make every :class:`BatchNorm2d` in ``model`` compute its statistics over the ranks of ``group``."""
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            module.group = group


@torch.no_grad()
def averaged_statistics(
    model: nn.Module, layout: Layout, kinds: tuple[type[nn.Module], ...] = (BatchNorm2d,)
) -> dict[str, Tensor]:
    """Return the running means and variances of every batch norm, averaged over the replicas.

    They are for an evaluation of batch norms whose replicas each use only their own samples.

    All replicas must call this; it runs one all-reduce. The result maps buffer names of the model to copies. With a
    single replica, it has the buffers themselves.

    Args:
        kinds: classes of the batch norms, whose only buffers are these statistics.
    """
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        if isinstance(module, kinds)
        for name, buffer in module.named_buffers(recurse=False)
    }
    group = layout.group("dp")
    if group is None or not buffers:
        return buffers
    flat = torch.cat([buffer.flatten() for buffer in buffers.values()])
    dist.all_reduce(flat, group=group)
    flat /= layout.size("dp")
    return dict(zip(buffers, flat.split([buffer.numel() for buffer in buffers.values()]), strict=True))


class FrozenBatchNorm2d(nn.Module):
    """``y = x s + b`` per channel, with ``s = weight / sqrt(running_var + eps)`` and ``b = bias - running_mean s``.

    The four tensors are buffers with the names of ``torch.nn.BatchNorm2d``, marked as frozen. They stay fp32 for
    every dtype of the activations except fp64. Loading a state removes ``num_batches_tracked``.

    Args:
        channels: C.
        eps: added to the variance; may be 0.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        mark_frozen(self, ["weight", "bias", "running_mean", "running_var"])

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return ``s`` and ``b``, each (C,), in the dtype of the buffers."""
        scale_C = self.weight * torch.rsqrt(self.running_var + self.eps)
        return scale_C, self.bias - self.running_mean * scale_C

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return ``x s + b`` in the shape and dtype of ``x_NCHW``."""
        scale_C, shift_C = self.scale_and_shift()
        return (x_NCHW * scale_C.view(-1, 1, 1) + shift_C.view(-1, 1, 1)).to(x_NCHW.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
