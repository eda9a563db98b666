"""Convolution layers around :mod:`common.ops.conv_bias_relu`, with a bias or with a frozen batch norm.

A frozen batch norm needs no separate pass, since ``s conv(x, w) + b = conv(x, s w) + b``.
Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.nn.batch_norm import FrozenBatchNorm2d
from common.ops import conv_bias_relu as ops
from common.ops.operation import OperationRequest


class FusedConv2d(nn.Conv2d):
    """Square convolution with fused bias, residual and ReLU. At stride 1, the padding keeps height and width.

    Args:
        kernel: height and width of the kernel, an odd number.
        bias: whether the layer has a bias. A layer without bias must be run by a :class:`FoldedConvolution`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = True
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias
        )
        self._conv_bias_relu = ops.CONV_BIAS_RELU.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        sizes = {
            "channels": self.in_channels,
            "filters": self.out_channels,
            "kernel": self.kernel_size[0],
            "stride": self.stride[0],
            "groups": self.groups,
        }
        self._conv_bias_relu = ops.CONV_BIAS_RELU.select(requested, OperationRequest(self.weight.device, dtype, sizes))
        return self._conv_bias_relu.name

    def run(
        self, x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, relu: bool, residual_NCHW: Tensor | None = None
    ) -> Tensor:
        """Return ``conv(x, weight) + bias + residual``, (N, C out, H, W), with ReLU if ``relu``.

        Weight and bias are the given ones, not the layer's own.
        """
        y_NCHW: Tensor = self._conv_bias_relu.function(
            x_NCHW, weight, bias_C, self.stride[0], self.kernel_size[0] // 2, self.groups, relu, residual_NCHW
        )
        return y_NCHW

    def forward(self, x_NCHW: Tensor, relu: bool = False, residual_NCHW: Tensor | None = None) -> Tensor:
        """Return ``conv(x) + bias + residual``, (N, C out, H, W), with ReLU if ``relu``. The residual is optional."""
        assert self.bias is not None
        return self.run(x_NCHW, self.weight, self.bias, relu, residual_NCHW)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, implementation={self._conv_bias_relu.name}"


class _Scaled(torch.autograd.Function):
    """``weight * scale``, multiplied in fp32 and rounded to the weight's dtype. The gradient does the same."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale_C111: Tensor) -> Tensor:
        ctx.save_for_backward(scale_C111)
        return torch.mul(weight, scale_C111, out=torch.empty_like(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scale_C111,) = ctx.saved_tensors
        return torch.mul(gradients[0], scale_C111, out=torch.empty_like(gradients[0])), None


class FoldedConvolution:
    """A convolution and the following frozen batch norm, run as one convolution with bias.

    It caches the norm's scale and shift if the weight is trained, else the scaled weight and the shift. When a frozen
    tensor changes, it recomputes the cache in the same memory, because captured graphs read it.

    Not a module, so that convolution and norm keep the names that their owner gives them.
    """

    def __init__(self, convolution: FusedConv2d, norm: FrozenBatchNorm2d) -> None:
        self._convolution = convolution
        self._norm = norm
        self._sources: list[Tensor] = []
        self._versions: list[int] = []
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_NCHW: Tensor, relu: bool, residual_NCHW: Tensor | None = None) -> Tensor:
        """Return ``norm(conv(x)) + residual``, with ReLU if ``relu``. The residual is optional."""
        weight = self._convolution.weight
        factor, shift_C = self._current()
        folded = _Scaled.apply(weight, factor) if weight.requires_grad else factor
        return self._convolution.run(x_NCHW, folded, shift_C, relu, residual_NCHW)

    def refresh(self) -> None:
        """Update the cache if there is one."""
        if self._kept is not None:
            self._current()

    def _current(self) -> tuple[Tensor, Tensor]:
        """Return scale (C, 1, 1, 1), or the scaled weight if it is not trained; and shift (C,) in its dtype."""
        if self._kept is not None and self._is_current():
            return self._kept
        made = self._fold()
        if made[1].is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # not cached: it holds no values before the graph is replayed
        if self._kept is not None and all(_alike(old, new) for old, new in zip(self._kept, made, strict=True)):
            for old, new in zip(self._kept, made, strict=True):
                old.copy_(new)
        else:
            self._kept = made
        # These aliases keep the memory alive, so that no new tensor gets the address of a converted or moved one.
        self._sources = [tensor.detach() for tensor in self._frozen_tensors()]
        self._versions = [tensor._version for tensor in self._sources]
        return self._kept

    def _frozen_tensors(self) -> list[Tensor]:
        weight = self._convolution.weight
        return [*self._norm.buffers(), *([] if weight.requires_grad else [weight])]

    def _is_current(self) -> bool:
        tensors = self._frozen_tensors()
        assert self._kept is not None
        return (
            self._kept[1].dtype == self._convolution.weight.dtype
            and [tensor.data_ptr() for tensor in tensors] == [tensor.data_ptr() for tensor in self._sources]
            and [tensor._version for tensor in tensors] == self._versions
        )

    @torch.no_grad()
    def _fold(self) -> tuple[Tensor, Tensor]:
        weight = self._convolution.weight
        scale_C, shift_C = self._norm.scale_and_shift()
        scale_C111 = scale_C.view(-1, 1, 1, 1)
        factor = scale_C111 if weight.requires_grad else _Scaled.apply(weight, scale_C111)
        return factor, shift_C.to(weight.dtype)


def _alike(old: Tensor, new: Tensor) -> bool:
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
