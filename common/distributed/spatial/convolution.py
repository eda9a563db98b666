"""3x3x3 convolution of a volume whose slabs are on several ranks.

Every rank convolves its slab as if zeros surrounded it, while the boundary planes are transferred. The outermost output
planes then lack the term of one kernel depth, which is a 2-D convolution of the halo. Convolution is linear, so the
missing term is added afterwards.

With y[o] = sum over k of W[k] x[s o + k - 1], where k = 0, 1, 2 is the kernel depth and s the stride, and a slab with
the D input planes 0 ... D - 1 and the output planes 0 ... D / s - 1:

- y[0] lacks W[0] x[-1]; with stride 1, y[D - 1] lacks W[2] x[D]. With stride 2 the last output reads up to plane D - 1.
- dx[i] sums W[k] dy[o] over all s o + k - 1 = i: dx[D - 1] lacks W[0] dy[D / s], the next rank's first plane; with
  stride 1, dx[0] lacks W[2] dy[-1]. With stride 2 only output 0 reads plane 0.
- dW[k] sums dy[o] x[s o + k - 1] also over pairs on different ranks; one of the two ranks must add each pair. The rank
  of x does: it adds dy[D / s] x[D - 1] for k = 0 and dy[-1] x[0] for k = 2, with the halos of dy that dx needs anyway,
  so no halo of x is kept. If x needs no gradient, as in a first layer, the rank of dy adds the pair instead, with
  x[-1] and x[D] kept from the forward pass; then the backward pass exchanges nothing.

Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.distributed.spatial.halo import HaloExchange, Halos
from common.ops.local_convolution import LOCAL_CONVOLUTION, LocalConvolution
from common.ops.operation import AUTO, OperationRequest

LOW, HIGH = 0, 2
"""Kernel depths that read the plane below a slab and the plane above it."""


class SpatialConv3d(nn.Module):
    """Convolution 3x3x3 with padding 1 and without bias; with an ``exchange`` it works on slabs.

    Args:
        in_channels, out_channels: number of channels of input and output.
        stride: 1 or 2, on all three axes.
        exchange: halo exchange between the slabs; None if each rank holds whole volumes.
        implementation: a name in :data:`common.ops.local_convolution.LOCAL_CONVOLUTION`, or ``auto``.
        device, dtype: device and dtype of weight and activations. The weight has the shape of nn.Conv3d's weight, in
            channels-last layout, and is not initialised.

    Raises:
        UnsupportedImplementation: see :meth:`common.ops.operation.Operation.select`.
        ValueError: the stride is not 1 or 2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        *,
        exchange: HaloExchange | None = None,
        implementation: str = AUTO,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if stride not in (1, 2):
            raise ValueError(f"stride={stride}: halos are derived for strides 1 and 2")
        device = torch.device(device)
        shape = (out_channels, in_channels, 3, 3, 3)
        empty = torch.empty(shape, device=device, dtype=dtype, memory_format=torch.channels_last_3d)
        self.weight = nn.Parameter(empty)
        self.stride = stride
        chosen = LOCAL_CONVOLUTION.select(implementation, OperationRequest(device, dtype, {"channels": in_channels}))
        self.implementation = chosen.name
        self._local: LocalConvolution = chosen.function
        self._exchange = exchange

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Return the convolution (N, C out, D', H', W') of a slab (both passes are collective), or of whole volumes.

        Raises:
            ValueError: the stride does not divide the number of planes of the slab.
        """
        if self._exchange is not None and x_NCDHW.shape[2] % self.stride:
            raise ValueError(f"a slab of {x_NCDHW.shape[2]} planes cannot be halved")
        y_NCDHW: Tensor = _SpatialConvolution.apply(x_NCDHW, self.weight, self.stride, self._local, self._exchange)
        return y_NCDHW

    def extra_repr(self) -> str:
        C_out, C_in = self.weight.shape[:2]
        split = "" if self._exchange is None else f", split over {self._exchange.split.ranks} ranks"
        return f"{C_in}, {C_out}, stride={self.stride}, implementation={self.implementation}{split}"


class _SpatialConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NCDHW: Tensor,
        weight: Tensor,
        stride: int,
        local: LocalConvolution,
        exchange: HaloExchange | None,
    ) -> Tensor:
        ctx.stride, ctx.local, ctx.exchange = stride, local, exchange
        halos = Halos(None, None)
        if exchange is None:
            y_NCDHW = local.forward(x_NCDHW, weight, stride)
        else:
            y_NCDHW, halos = _forward(x_NCDHW, weight, stride, local, exchange)
        keeps_halos = ctx.needs_input_grad[1] and not ctx.needs_input_grad[0]
        kept = (halos.low, halos.high) if keeps_halos else (None, None)
        ctx.save_for_backward(x_NCDHW, weight, *kept)
        return y_NCDHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCDHW: Tensor) -> tuple[Tensor | None, ...]:
        x_NCDHW, weight, low, high = ctx.saved_tensors
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        if ctx.exchange is not None and needs[0]:
            dx_NCDHW, dweight = _backward(dy_NCDHW, x_NCDHW, weight, ctx.stride, ctx.local, ctx.exchange, needs[1])
        else:
            dx_NCDHW, dweight = ctx.local.backward(dy_NCDHW, x_NCDHW, weight, ctx.stride, needs)
            if dweight is not None:
                _add_kept_halos(dweight, dy_NCDHW, Halos(low, high), ctx.stride)
        return dx_NCDHW, dweight, None, None, None


def _forward(
    x_NCDHW: Tensor, weight: Tensor, stride: int, local: LocalConvolution, exchange: HaloExchange
) -> tuple[Tensor, Halos]:
    """Return the slab's output planes, and the halos that were added to them."""
    pending = exchange.start(x_NCDHW, to_previous=stride == 1)
    y_NCDHW = local.forward(x_NCDHW, weight, stride)
    with pending.received() as halos:
        corrections = _missing_outputs(halos, weight, stride)
    for plane, correction_NCHW in corrections:
        y_NCDHW.select(2, plane).add_(correction_NCHW)
    return y_NCDHW, halos


def _missing_outputs(halos: Halos, weight: Tensor, stride: int) -> list[tuple[int, Tensor]]:
    """Return pairs of an output plane's index and its missing term."""
    return [
        (plane, F.conv2d(halo_NCHW, weight[:, :, depth], stride=stride, padding=1))
        for plane, depth, halo_NCHW in ((0, LOW, halos.low), (-1, HIGH, halos.high))
        if halo_NCHW is not None
    ]


def _backward(
    dy_NCDHW: Tensor,
    x_NCDHW: Tensor,
    weight: Tensor,
    stride: int,
    local: LocalConvolution,
    exchange: HaloExchange,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the slab and of the weight; the latter must still be summed over the ranks."""
    needs = True, needs_weight
    pending = exchange.start(dy_NCDHW, to_next=stride == 1)
    dx_NCDHW, dweight = local.backward(dy_NCDHW, x_NCDHW, weight, stride, needs)
    with pending.received() as halos:
        corrections = _missing_gradients(halos, x_NCDHW, weight, stride, needs)
    for plane, depth, dx_NCHW, dweight_plane in corrections:
        if dx_NCDHW is not None:
            dx_NCDHW.select(2, plane).add_(dx_NCHW)
        if dweight is not None:
            dweight.select(2, depth).add_(dweight_plane)
    return dx_NCDHW, dweight


def _missing_gradients(
    halos: Halos, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> list[tuple[int, int, Tensor, Tensor]]:
    """Return input plane, kernel depth and the missing terms of both gradients, computed from the halos of dy."""
    return [
        (plane, depth, *_plane_gradients(halo_NCHW, x_NCDHW.select(2, plane), weight[:, :, depth], stride, needs))
        for plane, depth, halo_NCHW in ((-1, LOW, halos.high), (0, HIGH, halos.low))
        if halo_NCHW is not None
    ]


def _add_kept_halos(dweight: Tensor, dy_NCDHW: Tensor, halos: Halos, stride: int) -> None:
    """Add the missing terms to the weight gradient of a first layer, computed from the halos of x."""
    for plane, depth, halo_NCHW in ((0, LOW, halos.low), (-1, HIGH, halos.high)):
        if halo_NCHW is not None:
            dy_NCHW, weight_plane = dy_NCDHW.select(2, plane), dweight[:, :, depth]
            _, correction = _plane_gradients(dy_NCHW, halo_NCHW, weight_plane, stride, (False, True))
            weight_plane.add_(correction)


def _plane_gradients(
    dy_NCHW: Tensor, x_NCHW: Tensor, weight_plane: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of one input plane and of one kernel depth."""
    dx_NCHW, dweight_plane, _ = torch.ops.aten.convolution_backward(
        dy_NCHW, x_NCHW, weight_plane, None, [stride] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1, [*needs, False]
    )
    return dx_NCHW, dweight_plane
