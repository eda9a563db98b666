"""Products with a frozen weight: the forward product and the input gradient. There is no weight gradient.

In FP8, a weight has one scale and is cast while it is loaded, in parts, so that no whole copy in a wider dtype
exists. Activations are cast to e4m3, gradients to e5m2, with delayed scales (:mod:`common.ops.fp8_cast`). A Hopper
GPU multiplies FP8 only if both operands are contiguous along the summed dimension. Therefore the input gradient uses
a transposed copy of the weight, which exists only during the product unless ``keep_transposed``.

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.products import RowProduct, times
from common.errors import UnsupportedImplementation
from common.nn.decoder import DecoderArchitecture
from common.nn.scratch import Scratch
from common.ops import fp8_cast, transpose_fp8
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling
from common.ops.linear import LINEAR, fp8
from common.ops.linear.fp8 import multiply
from common.ops.operation import AUTO, OperationRequest

INPUT, GRADIENT = range(2)
ROWS_AT_ONCE = 1024
"""Number of rows of a weight that are converted to fp32 at a time during the cast."""


Operand = Tensor | Fp8Tensor
"""Operand of a product: in 16 or more bits, or in FP8 with its scale."""


def data_and_scale(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """Return the data and its inverse scale, which is None unless ``operand`` is in FP8."""
    return (operand.data, operand.scale_inverse) if isinstance(operand, Fp8Tensor) else (operand, None)


class FrozenProduct(Protocol):
    """A product with a frozen weight. Its operands are cast by itself, or by their producers with its scales."""

    @property
    def weight(self) -> Tensor:
        """The weight (O, I)."""
        ...

    def input_scaling(self) -> Scaling | None:
        """Return the state of the input's scale for a producer that casts; None if the producer must not cast."""
        ...

    def gradient_scaling(self) -> Scaling | None:
        """Return the state of the scale of the result's gradient, or None, as in :meth:`input_scaling`."""
        ...

    def cast_input(self, x_TI: Tensor, resting: bool) -> Operand:
        """Cast an input that its producer has not cast. ``resting`` leaves the scale unchanged."""
        ...

    def cast_with(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Operand:
        """Cast the input with a scale of an earlier cast."""
        ...

    def cast_gradient(self, dy_TO: Tensor) -> Operand:
        """Cast a gradient of the result that its producer has not cast."""
        ...

    def multiply(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T`` for any rows; a :data:`common.distributed.tensor_parallel.products.RowProduct`."""
        ...

    def towards_input(self, scratch: Scratch) -> RowProduct:
        """Return the product ``dx = dy W`` for any rows. It is valid until the scratch is used again."""
        ...


class HalfProduct:
    """The product in the dtype of the weight."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.weight = weight_OI

    def input_scaling(self) -> None:
        """Return None: this product needs no cast."""

    def gradient_scaling(self) -> None:
        """Return None: the input gradient needs no cast."""

    def cast_input(self, x_TI: Tensor, resting: bool) -> Tensor:
        """Return the input unchanged."""
        return x_TI

    def cast_with(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Tensor:
        """Return the input unchanged."""
        return x_TI

    def cast_gradient(self, dy_TO: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return dy_TO

    def multiply(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T``."""
        torch.mm(x_nI, self.weight.t(), out=y_nO)

    def towards_input(self, scratch: Scratch) -> RowProduct:
        """Return the product ``dx = dy W``."""
        return times(self.weight)


class Fp8FrozenProduct(nn.Module):
    """The product in FP8.

    Args:
        weight_OI: weight in any floating dtype, on the device. It is not kept.
        dtype: dtype of results.
        keep_transposed: whether to keep the transposed weight, instead of transposing for each input gradient.

    Attributes:
        weight: e4m3 (O, I).
        scale_inverse: 0-d fp32, inverse scale of the weight.
        scales: fp32 (2,), scales of the next input and the next gradient; 0 before the first use.
        pending: int32 (2, 2), scratch of the casts, zeros between casts.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, weight_OI: Tensor, dtype: torch.dtype, keep_transposed: bool = False) -> None:
        super().__init__()
        device = weight_OI.device
        request = OperationRequest(device, dtype)
        self._cast = fp8_cast.FP8_CAST.select(AUTO, request).function
        transposing = OperationRequest(device, E4M3)
        self._transpose = transpose_fp8.TRANSPOSE_FP8.select(AUTO, transposing).function
        data, scale_inverse = cast_weight(weight_OI)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.scale_inverse = nn.Parameter(scale_inverse, requires_grad=False)
        self._transposed_IO: Tensor | None = None
        if keep_transposed:
            self._transposed_IO = self._turn(data.new_empty(data.shape[::-1]))
        self.register_buffer("scales", torch.zeros(2, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(2, 2, dtype=torch.int32, device=device), persistent=False)

    def input_scaling(self) -> Scaling | None:
        """Return the state of the input's scale."""
        return Scaling(self.scales[INPUT], self.pending[INPUT])

    def gradient_scaling(self) -> Scaling | None:
        """Return the state of the scale of the result's gradient."""
        return Scaling(self.scales[GRADIENT], self.pending[GRADIENT])

    def cast_input(self, x_TI: Tensor, resting: bool) -> Fp8Tensor:
        """Cast an input that its producer has not cast to e4m3. ``resting`` leaves the scale unchanged."""
        result: Fp8Tensor = self._cast(x_TI, self.input_scaling(), E4M3, False, resting)
        return result

    def cast_with(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """Cast the input to e4m3 with a scale of an earlier cast."""
        assert scale_inverse is not None
        scaling = Scaling(scale_inverse.reciprocal(), self.pending[INPUT])
        result: Fp8Tensor = self._cast(x_TI, scaling, E4M3, False, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """Cast a gradient that its producer has not cast to e5m2."""
        result: Fp8Tensor = self._cast(dy_TO, self.gradient_scaling(), E5M2, False, False)
        return result

    def multiply(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T``."""
        self._multiply(x_nI, scale_inverse, self.weight, y_nO)

    def towards_input(self, scratch: Scratch) -> RowProduct:
        """Return the product ``dx = dy W``. It is valid until the scratch is used again."""
        transposed_IO = self._transposed_IO

        def product(dy_nO: Tensor, scale_inverse: Tensor | None, dx_nI: Tensor) -> None:
            nonlocal transposed_IO
            if transposed_IO is None:  # lazy, so that it overlaps with the transfer of tokens
                transposed_IO = self._turn(scratch.turned(self.weight.shape[::-1], E4M3))
            self._multiply(dy_nO, scale_inverse, transposed_IO, dx_nI)

        return product

    def _multiply(self, left_nK: Tensor, scale_inverse: Tensor | None, right_NK: Tensor, out_nN: Tensor) -> None:
        """Compute ``left right^T``. ``right_NK`` is the weight or its transpose."""
        assert scale_inverse is not None
        multiply(left_nK, right_NK, scale_inverse, self.scale_inverse, out_nN.dtype, out=out_nN)

    def _turn(self, target_IO: Tensor) -> Tensor:
        """Write the transposed weight into ``target_IO`` and return it."""
        self._transpose(self.weight, target_IO)
        return target_IO

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8FrozenProduct:
        """Refuse every move or cast."""
        raise TypeError("an FP8 weight stays where it was cast")


def check_fp8(
    linear: str,
    architecture: DecoderArchitecture,
    ranks: int,
    tokens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Check that FP8 products of these sizes can run, before any weight is read.

    Args:
        linear: ``fp8`` or ``te``.
        ranks: number of ranks that share each layer.
        tokens: numbers of tokens of the micro-batches, each divided over the ranks.
        device, dtype: device and dtype of the activations.

    Raises:
        UnsupportedImplementation: the message names ``model.linear`` and the reason.
    """
    shape = architecture
    split = (shape.qkv_features, shape.attention_features, shape.feed_forward)
    for size in (shape.hidden, *(features // ranks for features in split)):
        reason = LINEAR.unsupported(linear, OperationRequest(device, dtype, {"columns": size}))
        if reason is not None:
            raise UnsupportedImplementation(f"model.linear={linear}: {reason}")
    for count in tokens:
        if count % (ranks * fp8.MULTIPLE):
            raise UnsupportedImplementation(
                f"model.linear={linear}: a product of {count / ranks:g} tokens; FP8 needs a multiple of {fp8.MULTIPLE}"
            )


@torch.no_grad()
def cast_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Cast a weight to e4m3 with one scale that uses the whole range; return it and the inverse scale (0-d fp32)."""
    parts = weight_OI.split(ROWS_AT_ONCE)
    amax = torch.stack([part.abs().amax() for part in parts]).amax().float()
    largest = torch.finfo(E4M3).max
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    data = torch.empty(weight_OI.shape, dtype=E4M3, device=weight_OI.device)
    for part, target in zip(parts, data.split(ROWS_AT_ONCE), strict=True):
        target.copy_((part.float() * scale).clamp(-largest, largest).to(E4M3))
    return data, scale.reciprocal()
