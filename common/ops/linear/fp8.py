"""The products of a linear layer in FP8, forward and backward.

Activations and weights are cast to e4m3, gradients to e5m2, with one delayed scale per tensor and rank
(:mod:`common.ops.fp8_cast`). Products accumulate the fast way (no promotion to fp32 registers between steps of
the tensor cores) and give fp16 or bf16. A Hopper GPU multiplies FP8 only where both operands run along the summed
dimension in memory, so each tensor is wanted in its own order and as its transpose (T tokens, K in, N out):

    y  (T, N) = x (T, K) w (N, K)^T      of x and w
    dx (T, K) = dy (T, N) w^T (K, N)^T   of dy and the transpose of w
    dw (N, K) = dy^T (N, T) x^T (K, T)^T of the transposes of dy and x

Casts write both at once. Best is no cast: what makes an input writes it in FP8 itself (``input_scaling``), and what
reads a result the gradient (:class:`common.ops.fp8_cast.reference.Handover`), without the transpose, which the product
makes in backward (:mod:`common.ops.transpose_fp8`).

Backward keeps x and w in FP8, once. In BERT-large (24 layers of QKV 1024 -> 3072, output 1024 -> 1024, FC1
1024 -> 4096, FC2 4096 -> 1024) with 24,576 tokens that is 24 * 24,576 * 7,168 B = 4.23 GB of inputs, half of what bf16
keeps, and 24 * 12.6 MB = 0.30 GB of weights; their other order, which the next cast replaces, takes as much again.

A scale belongs to its use: every cast hands on the inverse of the scale that it used, so several forward passes may
come before their backward passes, in any order. Scales move with every use in training, also where the optimizer then
skips its step. Without gradients, as in evaluation, products are those of the weights' dtype and no scale moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UnsupportedImplementation
from common.ops import fp8_cast, transpose_fp8
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Handover, Scaling
from common.ops.operation import AUTO, OperationRequest

MULTIPLE = 16
"""Every dimension of an FP8 product is a multiple of it (cuBLASLt: 16-byte alignment of rows)."""

INPUT, WEIGHT, GRADIENT = range(3)


def unsupported(request: OperationRequest) -> str | None:
    """Why FP8 cannot serve ``request``; None if it may. A CPU is served too, slowly, for tests."""
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"FP8 products are of fp16 and bf16 tensors, not of {request.dtype}"
    if request.sizes["columns"] % MULTIPLE:
        return f"{request.sizes['columns']} columns are not a multiple of {MULTIPLE}, which FP8 products need"
    if request.device.type == "cpu":
        return None
    if request.device.type != "cuda":
        return f"FP8 products need a CUDA device, not {request.device.type}"
    major, minor = torch.cuda.get_device_capability(request.device)
    if (major, minor) < (8, 9):
        return f"FP8 products need compute capability 8.9, this GPU has {major}.{minor}"
    return None


class Fp8Product(nn.Module):
    """``x weight^T + bias`` in FP8, with the scales of one layer.

    Args:
        weight: (N, K) of the layer, on the device and in the dtype that it will have.

    Attributes:
        scales: fp32 (3,), of the next input, weight and gradient; 0 before the first use. A checkpoint has them.
        pending: int32 (3, 2), scratch of the casts, zeros between them.

    Raises:
        UnsupportedImplementation: N or K is not a multiple of 16.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        check_weight(weight)
        request = OperationRequest(weight.device, weight.dtype)
        self._cast = fp8_cast.FP8_CAST.select(AUTO, request).function
        transposing = OperationRequest(weight.device, E4M3)
        self._transpose = transpose_fp8.TRANSPOSE_FP8.select(AUTO, transposing).function
        self._weight: Fp8Tensor | None = None
        self._same_weight = False
        self.register_buffer("scales", torch.zeros(3, dtype=torch.float32, device=weight.device))
        self.register_buffer("pending", torch.zeros(3, 2, dtype=torch.int32, device=weight.device), persistent=False)

    def forward(
        self, x: Tensor | Fp8Tensor, weight: Tensor, bias: Tensor | None, handover: Handover | None = None
    ) -> Tensor:
        """Multiply.

        Args:
            x: (..., K) in the dtype of the weight, or (T, K) as a kernel has cast it. The number of rows is a multiple
                of 16.
            weight: (N, K).
            bias: (N,) or None.
            handover: where the reader of the result leaves its gradient in FP8. It then leaves none in 16 bits, of
                which a bias could have its own.

        Returns:
            (..., N), dtype of the weight.

        Raises:
            UnsupportedImplementation: the number of rows is not a multiple of 16, or 0.
        """
        if handover is not None and bias is not None and bias.requires_grad:
            raise ValueError("a gradient that is handed over in FP8 gives the bias none: detach it")
        if not torch.is_grad_enabled():
            if isinstance(x, Fp8Tensor):
                raise TypeError("without gradients a product takes the tensor itself, not its FP8 form")
            return F.linear(x, weight, bias)
        if isinstance(x, Fp8Tensor):
            check_rows(x.data.shape[0])
            return self._times_weight(x, weight, bias, handover)
        x_TK = x.flatten(0, -2)
        check_rows(x_TK.shape[0])
        x8 = self._cast(x_TK.contiguous(), self.scaling(INPUT), E4M3, weight.requires_grad)
        return self._times_weight(x8, weight, bias, handover).view(*x.shape[:-1], -1)

    def scaling(self, role: int) -> Scaling:
        """State of ``INPUT``, ``WEIGHT`` or ``GRADIENT``."""
        return Scaling(self.scales[role], self.pending[role])

    def input_scaling(self) -> Scaling | None:
        """State of the scale of the input, for a producer that casts it; None without gradients, where nobody does."""
        return self.scaling(INPUT) if torch.is_grad_enabled() else None

    def handover(self) -> Handover | None:
        """For the gradient of one result, which its reader casts; None without gradients."""
        return Handover(self.scaling(GRADIENT)) if torch.is_grad_enabled() else None

    def cast_gradient(self, dy_TN: Tensor, transpose: bool) -> Fp8Tensor:
        """The gradient of the result in FP8."""
        result: Fp8Tensor = self._cast(dy_TN.contiguous(), self.scaling(GRADIENT), E5M2, transpose)
        return result

    def transpose(self, data: Tensor) -> Tensor:
        """The transpose of an FP8 matrix whose producer has left it."""
        transposed: Tensor = self._transpose(data, torch.empty_like(data))
        return transposed

    def _times_weight(self, x8: Fp8Tensor, weight: Tensor, bias: Tensor | None, handover: Handover | None) -> Tensor:
        if not self._same_weight:
            self._weight = self._cast(weight.detach(), self.scaling(WEIGHT), E4M3, True)
        elif self._weight is None:
            raise RuntimeError("same_weights() before any forward pass: there is no FP8 weight yet")
        result: Tensor = _Product.apply(x8.source, weight, bias, x8, self._weight, self, handover)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Product:
        """Move, but never cast: fp32 scales stay what they are in a model that is cast to half precision."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.scales.device)
        return self


@contextlib.contextmanager
def same_weights(model: nn.Module) -> Iterator[None]:
    """Within it, forward passes use the FP8 weights that the last one before it has cast.

    For the second and further micro-batches of a step, between which no weight changes: the caller says so, since
    optimizers write through flat buffers, which nothing in the model could notice. The host decides, so a captured
    step casts in its first micro-batch, in every replay.
    """
    products = [module for module in model.modules() if isinstance(module, Fp8Product)]
    for product in products:
        product._same_weight = True
    try:
        yield
    finally:
        for product in products:
            product._same_weight = False


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x8: Fp8Tensor,
        w8: Fp8Tensor,
        product: Fp8Product,
        handover: Handover | None,
    ) -> Tensor:
        kept = x8.data if x8.transposed is None else x8.transposed
        ctx.save_for_backward(kept, x8.scale_inverse, w8.transposed, w8.scale_inverse)
        ctx.transposed = x8.transposed is not None
        ctx.product, ctx.handover = product, handover
        return multiply(x8.data, w8.data, x8.scale_inverse, w8.scale_inverse, weight.dtype, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, x_inverse, w_KN, w_inverse = ctx.saved_tensors
        dy_TN = gradients[0]
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy8 = None if ctx.handover is None else ctx.handover.take()
        if dy8 is None:
            dy8 = ctx.product.cast_gradient(dy_TN, needs_dw)
        dx_TK = dw_NK = None
        if needs_dx:
            dx_TK = multiply(dy8.data, w_KN, dy8.scale_inverse, w_inverse, dy_TN.dtype)
        if needs_dw:
            dy_NT = ctx.product.transpose(dy8.data) if dy8.transposed is None else dy8.transposed
            x_KT = x if ctx.transposed else ctx.product.transpose(x)
            dw_NK = multiply(dy_NT, x_KT, dy8.scale_inverse, x_inverse, dy_TN.dtype)
        return dx_TK, dw_NK, dy_TN.sum(0) if needs_db else None, None, None, None, None


def multiply(
    left_MK: Tensor,
    right_NK: Tensor,
    left_inverse: Tensor,
    right_inverse: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``left right^T`` of two FP8 matrices, times both inverse scales, plus the bias: (M, N) in ``dtype``.

    ``out`` is where it goes; None for a new tensor.
    """
    operands = (left_MK, right_NK.t(), left_inverse, right_inverse)
    if out is None:
        return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=True)
    return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=True, out=out)


def check_weight(weight: Tensor) -> None:
    """Refuse a weight that FP8 products cannot take, naming its size."""
    for size in weight.shape:
        if size % MULTIPLE:
            raise UnsupportedImplementation(
                f"a weight of {' x '.join(map(str, weight.shape))} can't be multiplied in FP8: {size} is not a "
                f"multiple of {MULTIPLE}; use products in 16 bits"
            )


def check_rows(rows: int) -> None:
    """Refuse a number of rows that FP8 products cannot take."""
    if rows == 0 or rows % MULTIPLE:
        raise UnsupportedImplementation(
            f"a product of {rows} rows (tokens of a micro-batch) can't run in FP8, which needs a multiple of "
            f"{MULTIPLE}: choose another micro_batch, or products in 16 bits"
        )
