"""Frozen FP8 products with the casts, transposes and matrix products of Transformer Engine."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from common.language.fp8_products import FROZEN_GRADIENT, FROZEN_INPUT, Fp8FrozenProduct, FrozenWeight
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor
from common.ops.linear import te


class TeFrozenWeight(FrozenWeight):
    """A frozen weight in FP8, with the state of Transformer Engine's casts.

    Attributes:
        amaxes: fp32 (1, 2), scratch of the casts, zeros between casts.
    """

    amaxes: Tensor

    def __init__(self, weight_OI: Tensor, dtype: torch.dtype) -> None:
        super().__init__(weight_OI, dtype)
        self.scales.copy_(torch.tensor([1.0, te.first_gradient_scale(dtype)]))
        self.register_buffer("amaxes", torch.zeros(1, 2, dtype=torch.float32, device=weight_OI.device), False)


class TeFrozenProduct(Fp8FrozenProduct):
    """The product in FP8 through Transformer Engine, with the weights, formats and scales of the base class.

    No producer casts for it: results of norms, SwiGLU and rotation arrive in 16 bits and are cast in a separate pass.
    """

    state_type: ClassVar[type[FrozenWeight]] = TeFrozenWeight
    _scales: TeFrozenWeight

    def input_scaling(self) -> None:
        """Return None: no producer casts for this product."""

    def gradient_scaling(self) -> None:
        """Return None: no producer casts for the input gradient."""

    def cast_input(self, x_TI: Tensor, inference: bool) -> Fp8Tensor:
        """Return the input (T, I) in e4m3. The cast updates the scale, except in ``inference``."""
        return self._rounded(x_TI, FROZEN_INPUT, self._scales.scales[FROZEN_INPUT], inference)

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """Return the input (T, I) in e4m3, with the scale of an earlier cast."""
        assert scale_inverse is not None
        return self._rounded(x_TI, FROZEN_INPUT, scale_inverse.reciprocal(), True)

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """Return the gradient (T, O) in e5m2. The cast updates the scale."""
        return self._rounded(dy_TO, FROZEN_GRADIENT, self._scales.scales[FROZEN_GRADIENT], False)

    def _multiply(
        self,
        left_nK: Tensor,
        scale_inverse: Tensor | None,
        right_NK: Tensor,
        right_inverse: Tensor,
        out_nN: Tensor,
        bias_N: Tensor | None = None,
    ) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        assert scale_inverse is not None
        right, left = _engine(right_NK, right_inverse), _engine(left_nK, scale_inverse)
        general_gemm(right, left, out_dtype=out_nN.dtype, out=out_nN)

    def _write_transposed(self, target_IO: Tensor) -> Tensor:
        from transformer_engine.pytorch.constants import TE_DType, tex

        tex.fp8_transpose(self.weight.view(torch.uint8), TE_DType[E4M3], out=target_IO.view(torch.uint8))
        return target_IO

    def _rounded(self, x: Tensor, role: int, scale: Tensor, resting: bool) -> Fp8Tensor:
        dtype, amaxes = E5M2 if role == FROZEN_GRADIENT else E4M3, self._scales.amaxes[:, role : role + 1]
        parts = te.cast(x, scale, amaxes[0], dtype, False).get_metadata()
        if resting:
            amaxes.zero_()
        else:
            te.advance(amaxes, self._scales.scales[role : role + 1], dtype)
        return Fp8Tensor(parts["data"].view(dtype), None, parts["fp8_scale_inv"].view(()), x)


def _engine(data: Tensor, scale_inverse: Tensor) -> Any:
    """Wrap FP8 values in a tensor of Transformer Engine."""
    from transformer_engine.pytorch import Float8TensorStorage
    from transformer_engine.pytorch.constants import TE_DType

    return Float8TensorStorage(
        data=data.view(torch.uint8), fp8_scale_inv=scale_inverse.view(1), fp8_dtype=TE_DType[data.dtype],
        data_transpose=None,
    )  # fmt: skip
