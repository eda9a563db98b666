"""Group norm and layer norm, around :mod:`common.ops.group_norm` and :mod:`common.ops.add_layer_norm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.ops.add_layer_norm import ADD_LAYER_NORM
from common.ops.group_norm import GROUP_NORM, GroupNormResult
from common.ops.operation import OperationRequest


class LayerNorm(nn.Module):
    """Residual addition and layer norm. Parameters are named as in ``torch.nn.LayerNorm``.

    Args:
        features: C.
        eps: added to the variance.
    """

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self._add_layer_norm = ADD_LAYER_NORM.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"features": self.weight.numel()})
        self._add_layer_norm = ADD_LAYER_NORM.select(requested, request)
        return self._add_layer_norm.name

    def forward(
        self, x_RC: Tensor, residual_RC: Tensor | None = None, *, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum ``x + residual + added`` and the normalised sum, (R, C) each.

        ``added`` (C,) is added to every row. See :func:`common.ops.add_layer_norm.add_layer_norm_reference`.
        """
        result: tuple[Tensor, Tensor] = self._add_layer_norm.function(
            x_RC, residual_RC, self.weight, self.bias, self.eps, added_C=added
        )
        return result

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, implementation={self._add_layer_norm.name}"


class GroupNorm(nn.Module):
    """Group norm with optional fused SiLU. Parameters are named as in ``torch.nn.GroupNorm``.

    Statistics are fp32 for all dtypes of activations and parameters.

    Args:
        channels: C, the sum over all inputs.
        groups: number of groups, a divisor of C.
        eps: added to the variance.
        silu: whether SiLU follows.
        inputs: number of inputs of :meth:`forward`, 1 or 2. Not every implementation supports 2.
        added: whether :meth:`forward` gets ``added``.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float = 1e-5,
        silu: bool = False,
        *,
        inputs: int = 1,
        added: bool = False,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.silu = silu
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self._sizes = {"channels": channels, "groups": groups, "inputs": inputs, "added": int(added)}
        self._group_norm = GROUP_NORM.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        self._group_norm = GROUP_NORM.select(requested, OperationRequest(self.weight.device, dtype, self._sizes))
        return self._group_norm.name

    def forward(self, *inputs: Tensor, added: Tensor | None = None, keep: bool = False) -> GroupNormResult:
        """Normalise the inputs; see :func:`common.ops.group_norm.group_norm_reference`.

        Args:
            inputs: one tensor or a pair, (N, C_i, H, W).
            added: (N, C), added to a single input before the statistics.
            keep: whether to return the inputs as well.

        Returns:
            (N, C, H, W) in channels_last; with ``keep``, a pair of it and the tuple of inputs.

        Raises:
            ValueError: sizes do not fit.
        """
        result: GroupNormResult = self._group_norm.function(
            inputs, self.weight, self.bias, self.groups, self.eps, silu=self.silu, added_NC=added, keep=keep
        )
        return result

    def extra_repr(self) -> str:
        return (
            f"{self.weight.numel()}, groups={self.groups}, eps={self.eps}, silu={self.silu}, "
            f"implementation={self._group_norm.name}"
        )
