"""Products in FP8 with a frozen weight: the forward product and the input gradient. There is no weight gradient.

A weight has one scale and is cast while it is loaded, in parts, so that no whole copy in a wider dtype exists. A Hopper
GPU multiplies FP8 only if both operands are contiguous along the summed dimension. Therefore the input gradient uses a
transposed copy of the weight, which exists only during the product unless it is kept. Legend: as in
:mod:`common.language.products`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.products import RowProduct
from common.errors import CheckpointError, UnsupportedImplementation
from common.language.architecture import Architecture
from common.language.movement import GatheredFp8, Movement, Operand
from common.language.network import Decoder
from common.language.products import Fp8Product, Shared
from common.language.scales import Scales
from common.ops.fp8_cast.reference import E4M3
from common.ops.linear import LINEAR, fp8
from common.ops.operation import OperationRequest

INPUT, GRADIENT = range(2)
ROWS_AT_ONCE = 1024
"""Number of rows of a weight that are converted to fp32 at a time during the cast."""


class FrozenWeight(Scales):
    """A frozen weight in FP8, with the scales of its product's operands.

    Args:
        weight_OI: weight in any floating dtype, on the device. It is not kept.
        dtype: dtype of results.

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


class Fp8FrozenProduct(Fp8Product):
    """The product in FP8.

    Args:
        state: the weight and the scales of the operands.
        keep_transposed: whether to keep the transposed weight, instead of transposing for each input gradient.

    Attributes:
        state_type: class of ``state``.
    """

    state_type: ClassVar[type[FrozenWeight]] = FrozenWeight

    def __init__(self, state: FrozenWeight, movement: Movement, shared: Shared, keep_transposed: bool = False) -> None:
        super().__init__(state.weight, movement, None, state, (INPUT, GRADIENT), shared.scratch, state.dtype)
        self._inverse = state.scale_inverse
        self._transposed_IO: Tensor | None = None
        if keep_transposed:
            self._transposed_IO = self._turn(self.weight.new_empty(self.weight.shape[::-1]))

    def forward_rows(self, x_nI: Tensor, scale_inverse: Tensor | None, y_nO: Tensor) -> None:
        """Compute ``y = x W^T``."""
        self._multiply(x_nI, scale_inverse, self.weight, self._inverse, y_nO)

    def towards_input(self) -> RowProduct:
        """Return the product ``dx = dy W``. It is valid until the scratch is used again."""
        transposed_IO = self._transposed_IO

        def product(dy_nO: Tensor, scale_inverse: Tensor | None, dx_nI: Tensor) -> None:
            nonlocal transposed_IO
            if transposed_IO is None:  # lazy, so that it overlaps with the transfer of tokens
                transposed_IO = self._turn(self._scratch.turned(self.weight.shape[::-1], E4M3))
            self._multiply(dy_nO, scale_inverse, transposed_IO, self._inverse, dx_nI)

        return product

    def add_weight_gradient(self, dy_TO: Operand | GatheredFp8, x_TI: Operand | GatheredFp8) -> None:
        """Raise a TypeError: a frozen weight has no gradient."""
        raise TypeError("a frozen weight has no gradient")

    def _turn(self, target_IO: Tensor) -> Tensor:
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
