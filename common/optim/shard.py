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
        gradients: 1-d, the model's dtype: summed over the replicas.
        masters: 1-d float32; ``parameters`` itself when that is float32 or float64.
        fragments: in the order of their starts; there may be none, and elements between them are padding.
    """

    parameters: Tensor
    gradients: Tensor
    masters: Tensor
    fragments: tuple[Fragment, ...]

    @property
    def has_masters(self) -> bool:
        """Whether the masters are tensors of their own."""
        return self.masters is not self.parameters

    def new_state(self) -> Tensor:
        """A flat tensor of zeros with the masters' dtype and offsets: one kind of optimizer state."""
        return torch.zeros_like(self.masters)
