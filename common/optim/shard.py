"""This rank's part of the parameters of one dtype, on which an update rule works.

Without sharding the tensors of a Shard are the flat buffers. With sharding they are separate tensors with this rank's
pieces of all buckets, one after the other. A reduce-scatter writes into ``gradients``, and an all-gather reads from
``parameters``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FRAGMENT_ALIGNMENT = 64
"""Alignment of the start of every fragment, in elements. It allows vector loads for every dtype."""

_AT_ONCE = 1 << 26
"""Masters that are split at a time. Splitting 0.5 billion at once would need gigabytes of additional GPU memory."""


@dataclass(frozen=True)
class Fragment:
    """The part of one tensor that this rank updates; a rank has at most one fragment of a tensor.

    Attributes:
        tensor: number of the tensor among all tensors of all shards. A parameter is one tensor, or as many as
            ``ParameterGroup.parts`` says.
        group: index of its ParameterGroup.
        start: offset of the first element in the shard's flat tensors, a multiple of ``FRAGMENT_ALIGNMENT``.
        numel: number of its elements, at least one.
        stop: end of its padding. Elements from ``start + numel`` on are zero in all flat tensors.
    """

    tensor: int
    group: int
    start: int
    numel: int
    stop: int


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the parameters of one dtype. All its flat tensors share the same offsets.

    Attributes:
        parameters: 1-d, the model's dtype. An update writes it, and the other ranks gather it.
        gradients: 1-d, the model's dtype or fp32, summed over the replicas.
        masters: 1-d. fp32 for half precision; ``parameters`` itself for fp32 and fp64 parameters; int16 if masters
            are kept as remainders (:func:`split_masters`).
        fragments: ordered by start; may be empty. Elements between them are padding.

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
        """Whether the masters are separate tensors."""
        return self.masters is not self.parameters

    @property
    def has_remainders(self) -> bool:
        """Whether masters are kept as int16 remainders of bfloat16 parameters."""
        return self.masters.dtype == torch.int16

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the masters' values: fp32, or fp64 for fp64 parameters."""
        return torch.float32 if self.has_remainders else self.masters.dtype

    def new_state(self) -> Tensor:
        """Return a flat tensor of zeros with the masters' offsets and the dtype ``wide``: one kind of state."""
        return torch.zeros_like(self.masters, dtype=self.wide)

    def read_masters(self, part: slice) -> Tensor:
        """Return the values of some masters: a view, or with remainders a new tensor."""
        if not self.has_remainders:
            return self.masters[part]
        return joined_masters(self.parameters[part], self.masters[part])

    def write_parameters(self, out: Tensor, values: Tensor) -> None:
        """Write ``values`` of masters, rounded, to ``out``, parameters of the model that any rank may update."""
        if not self.has_remainders:
            out.copy_(values)
            return
        for piece, parameters in zip(values.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
            parameters.copy_(split_masters(piece)[0])

    def write_masters(self, part: slice, values: Tensor) -> None:
        """Set some masters, and the parameters if these are separate, to values in the dtype ``wide``."""
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
    """Return a bfloat16 and an int16 for every fp32 value, which together give that value bit for bit.

    The bfloat16 is the nearest one, or of two equally near the larger in magnitude. The int16 is the difference of
    the bit patterns.
    """
    bits = values.contiguous().view(torch.int32)
    nearest = (bits + (1 << 15)).bitwise_right_shift_(16)
    return nearest.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def joined_masters(parameters: Tensor, remainders: Tensor) -> Tensor:
    """Return the fp32 values from the two results of :func:`split_masters`."""
    bits = parameters.contiguous().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainders).view(torch.float32)
