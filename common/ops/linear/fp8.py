"""Products of a linear layer in FP8, forward and backward.

Activations and weights are cast to e4m3, gradients to e5m2, with one delayed scale per tensor and rank
(:mod:`common.ops.fp8_cast`). Products use fast accumulation (tensor cores do not promote partial sums to fp32
registers) and return fp16 or bf16. A Hopper GPU multiplies FP8 matrices only if the summed dimension is contiguous in
both operands, so each tensor is needed as it is and transposed (T tokens, K inputs, N outputs):

    y  (T, N) = x (T, K) w (N, K)^T      from x and w
    dx (T, K) = dy (T, N) w^T (K, N)^T   from dy and the transpose of w
    dw (N, K) = dy^T (N, T) x^T (K, T)^T from the transposes of dy and x

A cast writes both versions at once. It is faster to avoid the cast: the producer of an input writes it in FP8
(``input_scaling``), and the consumer of a result writes the gradient in FP8
(:class:`common.ops.fp8_cast.reference.Handover`). They write no transpose; backward makes it
(:mod:`common.ops.transpose_fp8`).

Backward keeps one FP8 version of x and w. For BERT-large (24 layers of QKV 1024 -> 3072, output 1024 -> 1024,
FC1 1024 -> 4096, FC2 4096 -> 1024) with 24,576 tokens, the inputs take 24 * 24,576 * 7,168 B = 4.23 GB, half of bf16.
The weights take 24 * 12.6 MB = 0.30 GB, and as much again for their other version, which the next cast replaces.

Every cast returns the inverse of the scale that it used, so several forward passes may precede their backward passes,
in any order. Scales change with every use in training, even if the optimizer skips the step. Without gradients, as in
evaluation, products run in the dtype of the weights and scales do not change.
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
"""Divisor of every dimension of an FP8 product (cuBLASLt: 16-byte alignment of rows)."""

INPUT, WEIGHT, GRADIENT = range(3)


def unsupported(request: OperationRequest) -> str | None:
    """Return why FP8 cannot serve ``request``; None if it can. Also supports a CPU, slowly, for tests."""
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


class Fp8LinearProduct(nn.Module):
    """An FP8 product ``x weight^T + bias`` with the scales of one layer.

    Args:
        weight: (N, K) weight of the layer, with its final device and dtype.

    Attributes:
        scales: fp32 (3,), scales of the next input, weight and gradient; 0 before the first use. Saved in checkpoints.
        pending: int32 (3, 2), scratch of the casts; zeros between casts.

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
        """Return ``x weight^T + bias`` as (..., N) in the dtype of the weight; not in FP8 if gradients are disabled.

        Args:
            x: (..., K) in the dtype of the weight, or (T, K) in FP8. The number of rows is a multiple of 16.
            weight: (N, K).
            bias: (N,) or None.
            handover: receives the gradient of the result in FP8 from the consumer. The gradient then does not exist in
                16 bits, so the bias must not require a gradient.

        Raises:
            UnsupportedImplementation: the number of rows is not a multiple of 16, or 0.
            RuntimeError: within :func:`same_weights` before the first forward pass.
            ValueError: there is a handover, and the bias requires a gradient.
            TypeError: x is in FP8 although gradients are disabled.
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
        """Return the scaling state of ``INPUT``, ``WEIGHT`` or ``GRADIENT``."""
        return Scaling(self.scales[role], self.pending[role])

    def input_scaling(self) -> Scaling | None:
        """Return the scaling state for a producer that casts the input; None if gradients are disabled."""
        return self.scaling(INPUT) if torch.is_grad_enabled() else None

    def handover(self) -> Handover | None:
        """Return a handover for a consumer that casts the gradient of one result; None if gradients are disabled."""
        return Handover(self.scaling(GRADIENT)) if torch.is_grad_enabled() else None

    def cast_gradient(self, dy_TN: Tensor, transpose: bool) -> Fp8Tensor:
        """Return the gradient of the result, (T, N), in e5m2; with its transpose (N, T) if ``transpose``."""
        result: Fp8Tensor = self._cast(dy_TN.contiguous(), self.scaling(GRADIENT), E5M2, transpose)
        return result

    def transpose(self, data: Tensor) -> Tensor:
        """Return the transpose of an FP8 matrix, in new memory."""
        transposed: Tensor = self._transpose(data, torch.empty_like(data))
        return transposed

    def _times_weight(self, x8: Fp8Tensor, weight: Tensor, bias: Tensor | None, handover: Handover | None) -> Tensor:
        if not self._same_weight:
            self._weight = self._cast(weight.detach(), self.scaling(WEIGHT), E4M3, True)
        elif self._weight is None:
            raise RuntimeError("same_weights() before any forward pass: there is no FP8 weight yet")
        result: Tensor = _Fp8Function.apply(x8.source, weight, bias, x8, self._weight, self, handover)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8LinearProduct:
        """Move the buffers, but keep the scales in fp32 when the model is cast to half precision."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.scales.device)
        return self


@contextlib.contextmanager
def same_weights(model: nn.Module) -> Iterator[None]:
    """Context in which forward passes reuse the FP8 weights that the last forward pass before it has cast.

    It is for the second and later micro-batches of a step, between which no weight changes. The caller must say so,
    because optimizers write to the weights through flat buffers, which the model cannot detect. The host decides, so a
    captured step casts the weights in its first micro-batch in every replay. After the context, even after an
    exception, passes cast again. With nested contexts this holds after the outermost one.
    """
    products = {module: module._same_weight for module in model.modules() if isinstance(module, Fp8LinearProduct)}
    for product in products:
        product._same_weight = True
    try:
        yield
    finally:
        for product, before in products.items():
            product._same_weight = before


class _Fp8Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x8: Fp8Tensor,
        w8: Fp8Tensor,
        product: Fp8LinearProduct,
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
    """Return ``left right^T`` of two FP8 matrices, times both inverse scales, plus the bias: (M, N) in ``dtype``.

    ``out`` receives the result; None allocates a new tensor.
    """
    operands = (left_MK, right_NK.t(), left_inverse, right_inverse)
    if out is None:
        return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=True)
    return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=True, out=out)


def check_weight(weight: Tensor) -> None:
    """Raise UnsupportedImplementation unless FP8 products can take the weight. The message names the wrong size."""
    for size in weight.shape:
        if size % MULTIPLE:
            raise UnsupportedImplementation(
                f"a weight of {' x '.join(map(str, weight.shape))} can't be multiplied in FP8: {size} is not a "
                f"multiple of {MULTIPLE}; use products in 16 bits"
            )


def check_rows(rows: int) -> None:
    """Raise UnsupportedImplementation unless FP8 products can take this number of rows."""
    if rows == 0 or rows % MULTIPLE:
        raise UnsupportedImplementation(
            f"a product of {rows} rows (tokens of a micro-batch) can't run in FP8, which needs a multiple of "
            f"{MULTIPLE}: choose another micro_batch, or products in 16 bits"
        )
