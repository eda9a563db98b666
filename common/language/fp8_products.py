"""Products in FP8: activations in e4m3, gradients in e5m2, with delayed scales (:mod:`common.ops.fp8_cast`).

A *frozen* weight has one scale and is cast while it is loaded, in parts, so that no whole copy in a wider dtype exists.
It has no gradient. A Hopper GPU multiplies FP8 only if both operands are contiguous along the summed dimension.
Therefore the input gradient uses a transposed copy of the weight, which exists only during the product unless it is
kept.

A *trained* weight is cast to e4m3 in the first forward pass of a step and kept for all micro-batches
(:class:`common.language.products.WeightCasts`). Without gradients (``inference``), for example in an evaluation, casts
use the scales of the next training step and do not change them. While a scale is unknown, a weight uses its own
maximum, and an input the maximum of a sample of its rows.

Legend: as in :mod:`common.language.products`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.ranks import RowProduct
from common.errors import CheckpointError, UnsupportedImplementation
from common.language.architecture import Architecture
from common.language.movement import GatheredFp8, Gathering, Movement, Operand, Scattering
from common.language.network import Decoder
from common.language.products import Product, Scales, Scratch, Shared
from common.nn.main_gradient import finish, main_gradient
from common.ops import fp8_cast, transpose_fp8, weight_gradient
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, scale_of
from common.ops.linear import LINEAR, fp8
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, check_rows, check_weight, multiply
from common.ops.operation import AUTO, OPTION, OperationRequest, asked_for

FROZEN_INPUT, FROZEN_GRADIENT = range(2)
"""Indices of the scales of a frozen weight's product; those of a trained weight are in :mod:`common.ops.linear.fp8`."""
ROWS_AT_ONCE = 1024
"""Number of rows of a weight that are converted to fp32 at a time during the cast."""


class Fp8BlockProduct(Product):
    """Base of the products in FP8.

    Args:
        roles: index of input and gradient in ``scales``.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        movement: Movement,
        bias_O: nn.Parameter | None,
        scales: Scales,
        roles: tuple[int, int],
        scratch: Scratch,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(weight_OI, movement, bias_O)
        self._scales, self._scratch, self._dtype = scales, scratch, dtype
        self._input, self._gradient = roles
        device = weight_OI.device
        self._cast = fp8_cast.FP8_CAST.select(AUTO, OperationRequest(device, dtype)).function
        self._transpose = transpose_fp8.TRANSPOSE_FP8.select(AUTO, OperationRequest(device, E4M3)).function

    def new_rows(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised tensor (rows, columns) in the dtype of results."""
        return torch.empty(rows, columns, dtype=self._dtype, device=self.weight.device)

    def input_scaling(self) -> Scaling | None:
        """Return the state of the input's scale."""
        return self._scales.scaling(self._input)

    def frozen(self, inference: bool) -> bool:
        """Return whether the input's scale stays unchanged."""
        return inference

    def gradient_scaling(self) -> Scaling | None:
        """Return the state of the scale of the result's gradient."""
        return self._scales.scaling(self._gradient)

    def cast_input(self, x_TI: Tensor, inference: bool) -> Fp8Tensor:
        """Return the input (T, I) in e4m3. The cast updates the scale, unless it is :meth:`frozen`."""
        scaling = self._scales.scaling(self._input)
        result: Fp8Tensor = self._cast(x_TI, scaling, E4M3, False, self.frozen(inference))
        return result

    def scaling_of(self, scale_inverse: Tensor | None) -> Scaling | None:
        """Return the scale of an earlier cast."""
        assert scale_inverse is not None
        return Scaling(scale_inverse.reciprocal(), self._scales.pending[self._input])

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """Return the input (T, I) in e4m3, with the scale of an earlier cast."""
        result: Fp8Tensor = self._cast(x_TI, self.scaling_of(scale_inverse), E4M3, False, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """Return the gradient (T, O) in e5m2. The cast updates the scale."""
        result: Fp8Tensor = self._cast(dy_TO, self._scales.scaling(self._gradient), E5M2, False, False)
        return result

    def shared_scale(self, role: int, scale_inverse: Tensor) -> Tensor:
        """Return the inverse scale to send with this rank's FP8 rows; 0 if ``role`` has had only zeros so far.

        Zeros leave the scale unknown and are cast with 1, which would otherwise be the coarsest scale of all ranks.
        """
        return torch.where(self._scales.scales[role] > 0, scale_inverse, 0.0)

    def _multiply(
        self,
        left_nK: Tensor,
        scale_inverse: Tensor | None,
        right_NK: Tensor,
        right_inverse: Tensor,
        out_nN: Tensor,
        bias_N: Tensor | None = None,
    ) -> None:
        """Compute ``left right^T + bias``."""
        assert scale_inverse is not None
        multiply(left_nK, right_NK, scale_inverse, right_inverse, out_nN.dtype, bias_N, out=out_nN)


class FrozenWeight(Scales):
    """A frozen weight in FP8, with the scales of its product's operands.

    Args:
        weight_OI: weight in any floating dtype, on the device. It is not kept.

    Attributes:
        weight: e4m3 (O, I).
        scale_inverse: 0-d fp32, inverse scale of the weight.
    """

    def __init__(self, weight_OI: Tensor, dtype: torch.dtype) -> None:
        super().__init__(2, weight_OI.device)
        data, scale_inverse = cast_weight(weight_OI)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.scale_inverse = nn.Parameter(scale_inverse, requires_grad=False)
        self.dtype = dtype

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenWeight:
        """Refuse every move or cast."""
        raise TypeError("an FP8 weight stays where it was cast")


class Fp8FrozenProduct(Fp8BlockProduct):
    """The product in FP8.

    Args:
        state: the weight and the scales of the operands.
        keep_transposed: whether to keep the transposed weight, instead of transposing for each input gradient.
    """

    state_type: ClassVar[type[FrozenWeight]] = FrozenWeight

    def __init__(self, state: FrozenWeight, movement: Movement, shared: Shared, keep_transposed: bool = False) -> None:
        super().__init__(
            state.weight, movement, None, state, (FROZEN_INPUT, FROZEN_GRADIENT), shared.scratch, state.dtype
        )
        self._inverse = state.scale_inverse
        self._transposed_IO: Tensor | None = None
        if keep_transposed:
            self._transposed_IO = self._write_transposed(self.weight.new_empty(self.weight.shape[::-1]))

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T``."""
        self._multiply(x_nI, scale_inverse, self.weight, self._inverse, y_nO)

    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W``. It is valid until the scratch is used again."""
        transposed_IO = self._transposed_IO

        def product(dy_nO: Tensor, scale_inverse: Tensor | None, dx_nI: Tensor) -> None:
            nonlocal transposed_IO
            if transposed_IO is None:  # lazy, so that it overlaps with the transfer of tokens
                transposed_IO = self._write_transposed(
                    self._scratch.slot("transposed weight", self.weight.shape[::-1], E4M3)
                )
            self._multiply(dy_nO, scale_inverse, transposed_IO, self._inverse, dx_nI)

        return product

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Raise a TypeError: a frozen weight has no gradient."""
        raise TypeError("a frozen weight has no gradient")

    def _write_transposed(self, target_IO: Tensor) -> Tensor:
        """Write the transposed weight into ``target_IO`` and return it."""
        self._transpose(self.weight, target_IO)
        return target_IO


def check_fp8(
    linear: str,
    architecture: Architecture,
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


@torch.no_grad()
def load_frozen(
    decoder: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    in_fp8: type[FrozenWeight] | None,
) -> None:
    """Load the frozen weights into a decoder on ``meta``, one tensor at a time. Each rank keeps its part.

    The adapters are allocated uninitialised.

    Args:
        tensors: name and whole value of every frozen weight, on any device, in any order.
        device, dtype: device and dtype of the computation.
        in_fp8: class of FP8 weights: each product of the blocks is cast as soon as it is loaded, so that the blocks
            never exist as a whole in a wider dtype. None to keep all weights in ``dtype``.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    splits = decoder.tensor_splits()
    missing = {name: parameter.shape for name, parameter in decoder.named_parameters() if not parameter.requires_grad}
    for name, tensor in tensors:
        own = splits[name].local_of(tensor) if name in splits else tensor
        shape = missing.pop(name, None)
        if shape != own.shape:
            raise CheckpointError(f"{name} is {tuple(own.shape)}, the network has {shape and tuple(shape)}")
        layer, moved = decoder.get_submodule(name.rpartition(".")[0]), own.to(device, dtype)
        if in_fp8 is not None and name.startswith("layers.") and moved.ndim > 1:
            layer.register_parameter("weight", None)
            layer.fp8 = in_fp8(moved, dtype)
        else:
            layer.weight = nn.Parameter(moved, requires_grad=False)
    if missing:
        raise CheckpointError(f"{next(iter(missing))} and {len(missing) - 1} other frozen weights are missing")
    for name, parameter in list(decoder.named_parameters()):
        if parameter.requires_grad:
            owner, _, own_name = name.rpartition(".")
            fresh = torch.empty(parameter.shape, device=device, dtype=dtype)
            setattr(decoder.get_submodule(owner), own_name, nn.Parameter(fresh))


class Fp8TrainedProduct(Fp8BlockProduct):
    """The product in FP8.

    Args:
        weight_OI: parameter in the dtype of the activations.
        scales: scales of input, weight and gradient.
        shared: decides when the weight is cast. With ``own_eval_scales``, an evaluation starts with unknown scales and
            updates them, on ranks that do not train. Otherwise, it uses the scales of training and does not change
            them.
        keep_transposed: whether to keep the transpose of the cast weight for the step.

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
        keep_transposed: bool = False,
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
        self._weight8_IO = self._weight8.new_empty(weight_OI.shape[::-1]) if keep_transposed else None
        self._weight_inverse = torch.ones((), dtype=torch.float32, device=device)
        self._step = -1

    def frozen(self, inference: bool) -> bool:
        """Return whether the input's scale stays unchanged."""
        return inference and not self._own_eval_scales

    def cast_again(self, x_TI: Tensor, scale_inverse: Tensor | None) -> Fp8Tensor:
        """Return the input (T, I) in e4m3 with an earlier cast's scale; with its transpose if no gathering follows."""
        alone = not isinstance(self.movement, Gathering)
        result: Fp8Tensor = self._cast(x_TI, self.scaling_of(scale_inverse), E4M3, alone, True)
        return result

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        """Return the gradient (T, O) in e5m2; with its transpose if no gathering follows."""
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
                weight_IO = self._transposed_copy(self._weight8, "transposed weight")
            self._multiply(dy_nO, scale_inverse, weight_IO, self._weight_inverse, dx_nI)

        return product

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Compute ``W.grad += dy^T x``."""
        dy_OT, dy_inverse = self._along_tokens(dy_TO, "transposed gradient")
        x_IT, x_inverse = self._along_tokens(x_TI, "transposed input")
        buffer = functools.partial(self._scratch.slot, "weight gradient")
        self._accumulate(dy_OT, x_IT, dy_inverse, x_inverse, main_gradient(self.weight), buffer)
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
            return self._transposed_copy(rows.data, slot, rows.scale_inverses / inverse), inverse
        assert isinstance(rows, Fp8Tensor)
        transposed = self._transposed_copy(rows.data, slot) if rows.transposed is None else rows.transposed
        return transposed, rows.scale_inverse

    def _transposed_copy(self, matrix_NK: Tensor, slot: str, factors_R: Tensor | None = None) -> Tensor:
        # A Hopper GPU multiplies FP8 only if both operands are contiguous along the summed dimension. These transposes
        # move 2 bytes per element: for Llama 3.1 8B and a row of 8,192 tokens 50 GB, about 2.5 % of the time. Producers
        # that write both orders would save 1 of the 2 bytes, but need kernels that hold tiles instead of rows.
        buffer = self._scratch.slot(slot, matrix_NK.shape[::-1], matrix_NK.dtype)
        transposed: Tensor = self._transpose(matrix_NK, buffer, factors_R)
        return transposed
