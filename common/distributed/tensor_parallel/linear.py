"""Linear layers of a network under autograd, with a chosen implementation, some of which the ranks of tp share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.distributed.tensor_parallel.layers import column_product, row_product
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import TensorSplit
from common.errors import UnsupportedImplementation
from common.ops.linear import Linear
from common.ops.operation import OPTION, REFERENCE


class SplitLinear(Linear):
    """A linear layer that the ranks of tp share. Its other arguments are those of this rank's part.

    Attributes:
        splits: split over the ranks, by name of each sharded parameter.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device,
        dtype: torch.dtype,
        bias: bool,
        splits: Mapping[str, TensorSplit],
        product: Callable[..., Tensor],
    ) -> None:
        super().__init__(in_features, out_features, device, dtype, bias)
        self.splits, self.product = splits, product


@dataclass(frozen=True)
class LinearLayers:
    """Makes the linear layers of a network, uninitialised.

    Attributes:
        implementation: implementation of the products over tokens, of :data:`common.ops.linear.LINEAR`.
        parallel: ranks that share these products.

    Raises:
        UnsupportedImplementation: several ranks share products that are not in the dtype of the weights.
    """

    implementation: str
    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel = field(default_factory=TensorParallel)

    def __post_init__(self) -> None:
        if self.parallel.size > 1 and self.implementation != REFERENCE:
            raise UnsupportedImplementation(
                f"{OPTION}.linear={self.implementation}: layout.tp={self.parallel.size} splits only products in the "
                "dtype of the weights"
            )

    def whole(self, in_features: int, out_features: int) -> Linear:
        """Return a layer that every rank has, with PyTorch's product."""
        return Linear(in_features, out_features, self.device, self.dtype)

    def column(self, in_features: int, *sections: int) -> Linear:
        """Return a layer over tokens, with some outputs of each section on every rank."""
        shapes = {"weight": (sum(sections), in_features), "bias": (sum(sections),)}
        splits = {name: self._split(shape, 0, sections) for name, shape in shapes.items()}
        return self._product(in_features, splits["bias"].local_shape[0], True, splits, column_product)

    def row(self, in_features: int, out_features: int, bias: bool = True) -> Linear:
        """Return a layer over tokens, with some inputs on every rank."""
        split = self._split((out_features, in_features), 1, (in_features,))
        return self._product(split.local_shape[1], out_features, bias, {"weight": split}, row_product)

    def _split(self, shape: tuple[int, ...], dim: int, sections: tuple[int, ...]) -> TensorSplit:
        return TensorSplit.sharded(shape, dim, sections, self.parallel.size, self.parallel.index)

    def _product(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        splits: Mapping[str, TensorSplit],
        over_ranks: Callable[[TensorParallel], Callable[..., Tensor]],
    ) -> Linear:
        if self.parallel.size == 1:
            layer = Linear(in_features, out_features, self.device, self.dtype, bias)
            layer.choose(self.implementation)
            return layer
        return SplitLinear(in_features, out_features, self.device, self.dtype, bias, splits, over_ranks(self.parallel))
