"""What an update rule works on: this rank's part of the parameters of one dtype.

Without sharding a Shard's tensors are the flat buffers themselves. With sharding they are tensors of their own: this
rank's pieces of all buckets, one after the other. A reduce-scatter writes into ``gradients``, an all-gather reads from
``parameters``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FRAGMENT_ALIGNMENT = 64
"""Elements that every fragment's start is a multiple of: kernels then load vectors whatever the dtype."""

_AT_ONCE = 1 << 26
"""Masters that are split at a time: an embedding of 0.5 billion would take gigabytes where a GPU has none left."""


@dataclass(frozen=True)
class Fragment:
    """The part of one tensor that this rank updates; a rank has at most one fragment of a tensor.

    Attributes:
        tensor: number of the tensor among all tensors of all shards. A parameter is one tensor, or as many as
            ``ParameterGroup.parts`` says.
        group: index of its ParameterGroup.
        start: offset of the first element in the shard's flat tensors, a multiple of ``FRAGMENT_ALIGNMENT``.
        numel: its elements, at least one.
        stop: end of what belongs to the fragment; from ``start + numel`` on it is padding: zero in all flat tensors.
    """

    tensor: int
    group: int
    start: int
    numel: int
    stop: int


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the parameters of one dtype; all flat tensors of it share the same offsets.

    Attributes:
        parameters: 1-d, the model's dtype: what an update writes and the other ranks gather.
        gradients: 1-d, the model's dtype or float32: summed over the replicas.
        masters: 1-d float32; ``parameters`` itself when that is float32 or float64; int16 where it is what the float32
            master has beyond its bfloat16 parameter (:func:`split_masters`).
        fragments: in the order of their starts; there may be none, and elements between them are padding.

    Raises:
        ValueError: a tensor is not contiguous.
    """

    parameters: Tensor
    gradients: Tensor
    masters: Tensor
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        if not all(flat.is_contiguous() for flat in (self.parameters, self.gradients, self.masters)):
            raise ValueError("the tensors of a shard must be contiguous")

    @property
    def has_masters(self) -> bool:
        """Whether the masters are tensors of their own."""
        return self.masters is not self.parameters

    @property
    def has_remainders(self) -> bool:
        """Whether a master is a parameter and a remainder together."""
        return self.masters.dtype == torch.int16

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the masters' values: float32, or float64 of float64."""
        return torch.float32 if self.has_remainders else self.masters.dtype

    def new_state(self) -> Tensor:
        """A flat tensor of zeros with the masters' dtype and offsets: one kind of optimizer state."""
        return torch.zeros_like(self.masters, dtype=self.wide)

    def read_masters(self, part: slice) -> Tensor:
        """The values of some masters; a view of them where they are there as such."""
        if not self.has_remainders:
            return self.masters[part]
        return joined_masters(self.parameters[part], self.masters[part])

    def write_parameters(self, out: Tensor, values: Tensor) -> None:
        """Set parameters of the model, of any rank's part, to what those of masters with these values are."""
        if not self.has_remainders:
            out.copy_(values)
            return
        for piece, parameters in zip(values.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
            parameters.copy_(split_masters(piece)[0])

    def write_masters(self, part: slice, values: Tensor) -> None:
        """Set some masters, and the parameters where these are others, to values in the dtype ``wide``."""
        if self.has_remainders:
            flats = (values, self.parameters[part], self.masters[part])
            for piece, parameters, remainders in zip(*(flat.split(_AT_ONCE) for flat in flats), strict=True):
                nearest, beyond = split_masters(piece)
                parameters.copy_(nearest)
                remainders.copy_(beyond)
            return
        self.masters[part].copy_(values)
        if self.has_masters:
            self.parameters[part].copy_(values)


def split_masters(values: Tensor) -> tuple[Tensor, Tensor]:
    """A bfloat16 and an int16 for every float32, which together are that float32 bit for bit.

    The bfloat16 is the nearest one; of two that are equally near, the larger in magnitude. The int16 is the difference
    of the bit patterns.
    """
    bits = values.contiguous().view(torch.int32)
    nearest = (bits + (1 << 15)).bitwise_right_shift_(16)
    return nearest.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def joined_masters(parameters: Tensor, remainders: Tensor) -> Tensor:
    """The float32 values that :func:`split_masters` has split."""
    bits = parameters.contiguous().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainders).view(torch.float32)
