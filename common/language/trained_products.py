"""Products in FP8 with a trained weight.

A weight is cast to e4m3 in the first forward pass of a step and kept for all micro-batches
(:mod:`common.language.scales`). Without gradients (``inference``), for example in an evaluation, casts use the scales
of the next training step and do not change them. While a scale is unknown, a weight uses its own maximum, and an input
the maximum of a sample of its rows. Legend: as in :mod:`common.language.products`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.products import RowProduct
from common.language.movement import GatheredFp8, Gathering, Movement, Operand, Scattering
from common.language.products import Fp8Product, Shared
from common.language.scales import Scales
from common.nn.main_gradient import finish, main_gradient
from common.ops import weight_gradient
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, scale_of
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, check_rows, check_weight
from common.ops.operation import OPTION, OperationRequest, asked_for


class Fp8TrainedProduct(Fp8Product):
    """The product in FP8.

    Args:
        weight_OI: parameter in the dtype of the activations.
        scales: scales of input, weight and gradient.
        shared: decides when the weight is cast. With ``own_eval_scales``, an evaluation starts with unknown scales and
            updates them, on ranks that do not train. Otherwise, it uses the scales of training and does not change
            them.
        keep_turned: whether to keep the transpose of the cast weight for the step.

    Raises:
        UnsupportedImplementation: O or I is not a multiple of 16, or ``shared.accumulation`` does not run here.
    """

    weight: nn.Parameter

    def __init__(
        self,
        weight_OI: nn.Parameter,
        movement: Movement,
        bias_O: nn.Parameter | None,
        scales: Scales,
        shared: Shared,
        keep_turned: bool = False,
    ) -> None:
        check_weight(weight_OI)
        super().__init__(weight_OI, movement, bias_O, scales, (INPUT, GRADIENT), shared.scratch, weight_OI.dtype)
        self._casts, self._own_eval_scales = shared.casts, shared.own_eval_scales
        shared.casts.before_evaluations(self._begin_evaluation)
        device = weight_OI.device
        request = OperationRequest(device, weight_OI.dtype)
        with asked_for(f"{OPTION}.accumulation", shared.accumulation):
            self._accumulate = weight_gradient.WEIGHT_GRADIENT.select(shared.accumulation, request).function
        # Allocated here, so that CUDA graphs keep the address. Keeping the transpose costs 1 byte per weight. For the
        # layers of GPT-3 over four ranks, whose weights have 1.3 times as many elements as a micro-batch's operands, it
        # saves 0.2 of about 10 ms per use.
        self._weight8 = torch.empty(weight_OI.shape, dtype=E4M3, device=device)
        self._weight8_IO = self._weight8.new_empty(weight_OI.shape[::-1]) if keep_turned else None
        self._weight_inverse = torch.ones((), dtype=torch.float32, device=device)
        self._step = -1

    def frozen(self, inference: bool) -> bool:
        """Return whether the input's scale stays unchanged."""
        return inference and not self._own_eval_scales

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """Cast the input to e4m3 with the scale of an earlier cast; also transpose it if no gathering follows."""
        alone = not isinstance(self.movement, Gathering)
        result: Fp8Tensor = self._cast(x_TI, self.scaling_of(scale_inverse), E4M3, alone, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """Cast the gradient to e5m2; also transpose it if no gathering follows."""
        alone = not isinstance(self.movement, Scattering)
        result: Fp8Tensor = self._cast(dy_TO.contiguous(), self._scales.scaling(GRADIENT), E5M2, alone)
        return result

    def prepare(self) -> None:
        """Cast the weight if it may have changed."""
        if self._step != self._casts.step:
            self._cast_weight()

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T + bias``."""
        check_rows(len(x_nI))
        self.prepare()
        bias_O = None if self.bias is None else self.bias.detach()
        self._multiply(x_nI, scale_inverse, self._weight8, self._weight_inverse, y_nO, bias_O)

    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W``. The weight is transposed once for all calls."""
        weight_IO = self._weight8_IO

        def product(dy_nO: Tensor, scale_inverse: Tensor | None, dx_nI: Tensor) -> None:
            nonlocal weight_IO
            if weight_IO is None:  # lazy, so that it overlaps with the transfer of tokens
                weight_IO = self._turned(self._weight8, "turned weight")
            self._multiply(dy_nO, scale_inverse, weight_IO, self._weight_inverse, dx_nI)

        return product

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Compute ``W.grad += dy^T x``."""
        dy_OT, dy_inverse = self._along_tokens(dy_TO, "turned gradient")
        x_IT, x_inverse = self._along_tokens(x_TI, "turned input")
        room = functools.partial(self._scratch.slot, "weight gradient")
        self._accumulate(dy_OT, x_IT, dy_inverse, x_inverse, main_gradient(self.weight), room)
        finish(self.weight)

    def _begin_evaluation(self) -> None:
        """Cast the weight for all passes of an evaluation. With ``own_eval_scales``, reset the scales first."""
        if self._own_eval_scales:
            self._scales.scales.zero_()
        self._cast_weight()

    def _cast_weight(self) -> None:
        inference = self._casts.inference
        scaling = self._inference_weight_scaling() if inference else self._scales.scaling(WEIGHT)
        cast: Fp8Tensor = self._cast(self.weight.detach(), scaling, E4M3, False, inference)
        self._weight8.copy_(cast.data)
        self._weight_inverse.copy_(cast.scale_inverse)
        if self._weight8_IO is not None and not inference:
            self._transpose(self._weight8, self._weight8_IO)
        self._step = self._casts.step

    def _inference_weight_scaling(self) -> Scaling:
        """Return the scale of the weight, or that of its exact maximum if it is unknown.

        The maximum of a sample may be far too small.
        """
        known, pending = self._scales.scaling(WEIGHT)
        largest = torch.linalg.vector_norm(self.weight.detach(), float("inf"), dtype=torch.float32)
        of_maximum = scale_of(largest, torch.finfo(E4M3).max, otherwise=torch.ones_like(largest))
        return Scaling(torch.where(known > 0, known, of_maximum), pending)

    def _along_tokens(self, rows: Operand | GatheredFp8, slot: str) -> tuple[Tensor, Tensor]:
        """Return the transpose of ``rows``, and its single inverse scale."""
        if isinstance(rows, GatheredFp8):
            # The product needs one scale: rows of ranks with a larger scale are rounded again by the transpose.
            inverse = rows.scale_inverses.amax().clamp(min=torch.finfo(torch.float32).tiny)
            return self._turned(rows.data, slot, rows.scale_inverses / inverse), inverse
        assert isinstance(rows, Fp8Tensor)
        turned = self._turned(rows.data, slot) if rows.transposed is None else rows.transposed
        return turned, rows.scale_inverse

    def _turned(self, matrix_NK: Tensor, slot: str, factors_R: Tensor | None = None) -> Tensor:
        # A Hopper GPU multiplies FP8 only if both operands are contiguous along the summed dimension. These transposes
        # move 2 bytes per element: for Llama 3.1 8B and a row of 8,192 tokens 50 GB, about 2.5 % of the time. Producers
        # that write both orders would save 1 of the 2 bytes, but need kernels that hold tiles instead of rows.
        room = self._scratch.slot(slot, matrix_NK.shape[::-1], matrix_NK.dtype)
        transposed: Tensor = self._transpose(matrix_NK, room, factors_R)
        return transposed
