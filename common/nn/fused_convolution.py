"""Convolution layers around :mod:`common.ops.conv_bias_relu`: with a bias of their own, or with a frozen batch norm.

A frozen batch norm needs no pass of its own, since ``s conv(x, w) + b = conv(x, s w) + b``.
Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.nn.frozen_batch_norm import FrozenBatchNorm2d
from common.ops import conv_bias_relu as ops
from common.ops.operation import OperationRequest


class FusedConv2d(nn.Conv2d):
    """Square convolution, padded to keep the size at stride 1, with bias, residual and ReLU in the same operation.

    Args:
        in_channels, out_channels: C of input and result.
        kernel: height and width, odd.
        stride: of both.
        groups: of channels that see each other.
        bias: whether it has one of its own; without one it is run by a :class:`FoldedConvolution`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = True
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias
        )
        self._conv_bias_relu = ops.CONV_BIAS_RELU.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """See :meth:`common.nn.choice.Choosing.choose`."""
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
        """``relu(conv(x, weight) + bias + residual)`` with a weight and a bias that stand for the layer's own."""
        y_NCHW: Tensor = self._conv_bias_relu.function(
            x_NCHW, weight, bias_C, self.stride[0], self.kernel_size[0] // 2, self.groups, relu, residual_NCHW
        )
        return y_NCHW

    def forward(self, x_NCHW: Tensor, relu: bool = False, residual_NCHW: Tensor | None = None) -> Tensor:
        """``conv(x) + bias + residual``, through ReLU if ``relu``; the residual may be absent."""
        assert self.bias is not None
        return self.run(x_NCHW, self.weight, self.bias, relu, residual_NCHW)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, implementation={self._conv_bias_relu.name}"


class _Scaled(torch.autograd.Function):
    """``weight * scale`` in the weight's dtype, from fp32 products; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale_C111: Tensor) -> Tensor:
        ctx.save_for_backward(scale_C111)
        return torch.mul(weight, scale_C111, out=torch.empty_like(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scale_C111,) = ctx.saved_tensors
        return torch.mul(gradients[0], scale_C111, out=torch.empty_like(gradients[0])), None


class FoldedConvolution:
    """A convolution and the frozen batch norm behind it as one convolution with a bias.

    What follows from frozen tensors alone is kept: the norm's scale and shift, or, of a weight that is not trained
    either, the weight with the scale in it. It is made anew, in the same memory for the sake of captured graphs, when
    one of these tensors has changed.

    Not a module, so that convolution and norm keep the names that their owner gives them.
    """

    def __init__(self, convolution: FusedConv2d, norm: FrozenBatchNorm2d) -> None:
        self._convolution = convolution
        self._norm = norm
        self._sources: list[Tensor] = []
        self._versions: list[int] = []
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_NCHW: Tensor, relu: bool, residual_NCHW: Tensor | None = None) -> Tensor:
        """``norm(conv(x)) + residual``, through ReLU if ``relu``; the residual may be absent."""
        weight = self._convolution.weight
        factor, shift_C = self._current()
        folded = _Scaled.apply(weight, factor) if weight.requires_grad else factor
        return self._convolution.run(x_NCHW, folded, shift_C, relu, residual_NCHW)

    def refresh(self) -> None:
        """Bring what is kept up to date, if anything is."""
        if self._kept is not None:
            self._current()

    def _current(self) -> tuple[Tensor, Tensor]:
        """Scale (C, 1, 1, 1), or the whole weight where it is not trained; and the shift (C,) in the weight's dtype."""
        if self._kept is not None and self._is_current():
            return self._kept
        made = self._fold()
        if made[1].is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # holds no values before the graph is replayed
        if self._kept is not None and all(_alike(old, new) for old, new in zip(self._kept, made, strict=True)):
            for old, new in zip(self._kept, made, strict=True):
                old.copy_(new)
        else:
            self._kept = made
        # Aliases: while they live, no other tensor can get the address of one that was converted or moved away.
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
