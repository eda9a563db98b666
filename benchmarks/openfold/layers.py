"""Layers that several parts of AlphaFold2 share: linear layers with its initial weights, norms, attention, transitions.

Shapes: B micro-batch, S sequences, N residues, C channels, H heads; X any dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.openfold.axial import Pending
from benchmarks.openfold.ops.dropout_add import DROPOUT_ADD
from benchmarks.openfold.ops.outer_product_mean import OUTER_PRODUCT_MEAN
from benchmarks.openfold.ops.pair_bias_attention import PAIR_BIAS_ATTENTION
from benchmarks.openfold.ops.triangle_gate import TRIANGLE_GATE
from common.ops.add_layer_norm import ADD_LAYER_NORM
from common.ops.operation import Operation, OperationRequest, select

OPERATIONS: dict[str, Operation] = {
    "pair_bias_attention": PAIR_BIAS_ATTENTION,
    "triangle_gate": TRIANGLE_GATE,
    "dropout_add": DROPOUT_ADD,
    "outer_product_mean": OUTER_PRODUCT_MEAN,
    "layer_norm": ADD_LAYER_NORM,
}
"""Operations whose implementation can be chosen in ``model.implementations``."""

Init = Literal["default", "relu", "glorot", "gating", "normal", "final"]
"""Initial weights: LeCun's and He's truncated normal distribution, Glorot's uniform one, 0 with bias 1 for gates, a
normal distribution, and 0."""

TRUNCATED_STD = 0.8796256610342398
"""Standard deviation of a standard normal distribution that is cut at 2."""


class Chooser:
    """Chooses the implementation of an operation for each layer.

    Args:
        requested: implementation by operation name; ``auto`` for operations that are not listed.

    Attributes:
        chosen: names of the implementations by operation; several, if layers of other sizes have another one.
    """

    def __init__(self, requested: Mapping[str, str], device: torch.device, dtype: torch.dtype) -> None:
        self._requested, self._device, self._dtype = requested, device, dtype
        self._names: dict[str, list[str]] = {}

    def __call__(self, name: str, **sizes: int) -> Any:
        """Return the function for a layer with these sizes."""
        request = OperationRequest(self._device, self._dtype, sizes)
        choice = select(self._requested, name, OPERATIONS[name], request)
        names = self._names.setdefault(name, [])
        if choice.name not in names:
            names.append(choice.name)
        return choice.function

    @property
    def chosen(self) -> dict[str, str]:
        """Names of the implementations by operation."""
        return {name: ", ".join(names) for name, names in self._names.items()}


class Linear(nn.Linear):
    """A linear layer with the initial weights that ``init`` names. Biases are 0, or 1 for gates."""

    def __init__(self, inputs: int, outputs: int, init: Init = "default", bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.init: Init = init

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, final_std: float = 0.0) -> None:
        """Draw the initial weights from a CPU generator.

        Args:
            final_std: standard deviation of the weights of final layers.
        """
        if self.init in ("default", "relu"):
            std = ((2.0 if self.init == "relu" else 1.0) / self.in_features) ** 0.5
            nn.init.trunc_normal_(self.weight, 0.0, 1.0, -2.0, 2.0, generator=generator)
            self.weight.mul_(std / TRUNCATED_STD)
        elif self.init == "glorot":
            nn.init.xavier_uniform_(self.weight, generator=generator)
        elif self.init == "normal":
            self.weight.normal_(0.0, self.in_features**-0.5, generator=generator)
        else:
            self.weight.normal_(0.0, final_std if self.init == "final" else 0.0, generator=generator)
        if self.bias is not None:
            self.bias.fill_(1.0 if self.init == "gating" else 0.0)


def merged(x_XC: Tensor, layers: Sequence[nn.Linear], bias: bool = True) -> Tensor:
    """Return the concatenated outputs of several layers, (X, sum of outputs), by one matrix product."""
    weight = torch.cat([layer.weight for layer in layers])
    return F.linear(x_XC, weight, torch.cat([layer.bias for layer in layers]) if bias else None)


class Norm(nn.LayerNorm):
    """Layer normalization of the last dimension by the chosen implementation."""

    def __init__(self, channels: int, choose: Chooser) -> None:
        super().__init__(channels)
        self._function = choose("layer_norm", features=channels)

    def forward(self, x_XC: Tensor) -> Tensor:
        """Return the result, of the shape of ``x``."""
        rows_RC = x_XC.reshape(-1, x_XC.shape[-1])
        return self._function(rows_RC, None, self.weight, self.bias, self.eps)[1].view(x_XC.shape)


class Masks(NamedTuple):
    """Dropout masks of a part of the network: functions of the seed, a site and an element's global position.

    Blocks that are computed again in the backward pass therefore get the same masks, and so do ranks with parts of a
    sample.

    Attributes:
        seed: 0-d int64 on the device.
        site: number of the part's first dropout; all dropouts of a step have different numbers.
        active: False in evaluation.
    """

    seed: Tensor
    site: int
    active: bool

    def skip(self, sites: int) -> Masks:
        """Return the masks of a part that begins ``sites`` later."""
        return self._replace(site=self.site + sites)


class Attention(nn.Module):
    """Gated multi-head self-attention over the third dimension of (B, S, N, C).

    Args:
        channels: number of channels of the input and of the output.
        width: channels of a head.
    """

    def __init__(self, channels: int, width: int, heads: int, choose: Chooser) -> None:
        super().__init__()
        self._heads, self._attention = heads, choose("pair_bias_attention", head_size=width)
        self.linear_q = Linear(channels, width * heads, "glorot", bias=False)
        self.linear_k = Linear(channels, width * heads, "glorot", bias=False)
        self.linear_v = Linear(channels, width * heads, "glorot", bias=False)
        self.linear_o = Linear(width * heads, channels, "final")
        self.linear_g = Linear(channels, width * heads, "gating")

    def forward(
        self, x_BSNC: Tensor, mask_BSN: Tensor, bias: Pending | None = None, transposed: bool = False
    ) -> Tensor:
        """Return the update (B, S, N, C). Keys with mask 0 are not seen.

        Args:
            bias: gather of the bias (B, H, N, N), which overlaps with the projections; None for no bias.
            transposed: attend over the second dimension instead of the third, with the transposed bias.
        """
        layers = (self.linear_q, self.linear_k, self.linear_v, self.linear_g)
        qkvg = merged(x_BSNC, layers, bias=False).unflatten(-1, (4, self._heads, -1))
        gate_HC = self.linear_g.bias.view(self._heads, -1)
        bias_BHNN = None if bias is None else bias.wait()
        if transposed:
            bias_BHNN = None if bias_BHNN is None else bias_BHNN.mT
            o = self._attention(qkvg.transpose(1, 2), gate_HC, mask_BSN.transpose(1, 2), bias_BHNN).transpose(1, 2)
        else:
            o = self._attention(qkvg, gate_HC, mask_BSN, bias_BHNN)
        return self.linear_o(o.flatten(-2))


class Transition(nn.Module):
    """Two linear layers with ``factor`` times as many channels between them."""

    def __init__(self, channels: int, factor: int, choose: Chooser) -> None:
        super().__init__()
        self.layer_norm = Norm(channels, choose)
        self.linear_1 = Linear(channels, factor * channels, "relu")
        self.linear_2 = Linear(factor * channels, channels, "final")

    def forward(self, x_XC: Tensor) -> Tensor:
        """Return the update, of the shape of ``x``."""
        return self.linear_2(F.relu(self.linear_1(self.layer_norm(x_XC))))
