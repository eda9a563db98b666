"""The network of CosmoFlow: four cosmological parameters from the particle counts of a cube at four redshifts.

It is the network of the MLPerf HPC reference: convolutions of 3x3x3 with bias, LeakyReLU and a 2x2x2 max-pool, then two
hidden dense layers with LeakyReLU and dropout, and an output layer with tanh, whose range is scaled. The voxels of the
last volume are flattened in the order D, H, W, C, as in Keras.

Shapes: N samples of a micro-batch, C channels, D H W volume, P parameters to estimate. Activations and
kernels are channels_last_3d.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from benchmarks.cosmoflow.ops.conv_leaky_pool import CONV_LEAKY_POOL, PoolPasses, conv_leaky_pool
from benchmarks.cosmoflow.ops.first_convolution import FIRST_CONVOLUTION, FirstConvolutionPasses, first_convolution
from benchmarks.cosmoflow.ops.log_counts import LOG_COUNTS
from benchmarks.cosmoflow.samples import PARAMETERS, REDSHIFTS
from common.config.ranges import AtLeast, Each, Positive, Range
from common.errors import ConfigError
from common.ops.dropout import DROPOUT
from common.ops.operation import Operation, OperationRequest, select
from common.ops.triton_support import widen

KERNEL = 3
"""Edge of the kernels of all convolutions, in voxels."""

Widths = Range("one or more positive numbers", lambda value: len(value) >= 1 and Each(AtLeast(1)).holds(value))


@dataclass(frozen=True)
class CosmoFlowArchitecture:
    """Sizes of the network, all of which the rules fix.

    Attributes:
        size: edge of a cube in voxels.
        filters: output channels of the convolutions, each of which halves the edges.
        hidden: outputs of the hidden dense layers.
        slope: factor of LeakyReLU on negative values.
        output_scale: factor on tanh.
    """

    size: Annotated[int, AtLeast(1)]
    filters: Annotated[tuple[int, ...], Widths]
    hidden: Annotated[tuple[int, ...], Widths]
    slope: Annotated[float, Positive]
    output_scale: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.size % 2 ** len(self.filters):
            raise ConfigError(
                f"size={self.size}: {len(self.filters)} convolutions halve the edges, so it must be a multiple of "
                f"{2 ** len(self.filters)}"
            )

    @property
    def convolutions(self) -> list[tuple[str, int, int]]:
        """Name, input channels and output channels of every convolution."""
        pairs = itertools.pairwise((REDSHIFTS, *self.filters))
        return [(f"conv{layer}", *pair) for layer, pair in enumerate(pairs, 1)]

    @property
    def dense(self) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of every dense layer; the last one is the output layer."""
        flat = self.filters[-1] * (self.size >> len(self.filters)) ** 3
        names = [*(f"dense{layer}" for layer in range(1, len(self.hidden) + 1)), "output"]
        pairs = itertools.pairwise((flat, *self.hidden, PARAMETERS))
        return [(name, *pair) for name, pair in zip(names, pairs, strict=True)]

    def forward_flops(self) -> dict[str, float]:
        """Return the FLOPs (2 per multiply-add) of every layer for one sample."""
        found = {}
        for level, (name, narrow, wide) in enumerate(self.convolutions):
            found[name] = 2.0 * KERNEL**3 * narrow * wide * (self.size >> level) ** 3
        return found | {name: 2.0 * inputs * outputs for name, inputs, outputs in self.dense}

    def training_flops(self) -> float:
        """Return the FLOPs for one sample: three forward passes, without the gradient of the counts."""
        flops = self.forward_flops()
        return 3 * sum(flops.values()) - flops["conv1"]


OPERATIONS: dict[str, Operation] = {
    "log_counts": LOG_COUNTS,
    "first_convolution": FIRST_CONVOLUTION,
    "conv_leaky_pool": CONV_LEAKY_POOL,
    "dropout": DROPOUT,
}
"""Operations whose implementation can be chosen in ``model.implementations``."""


class ConvPool(nn.Conv3d):
    """Convolution with bias, LeakyReLU and max-pool. Parameters are those of ``nn.Conv3d``."""

    passes: PoolPasses
    slope: float

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Map (N, C in, D, H, W) to (N, C out, D/2, H/2, W/2)."""
        assert self.bias is not None
        return conv_leaky_pool(self.passes, x_NCDHW, self.weight, self.bias, self.slope)


class FirstConvPool(nn.Conv3d):
    """As :class:`ConvPool`, of the network's input, which gets no gradient."""

    passes: FirstConvolutionPasses
    slope: float

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Map (N, C in, D, H, W) to (N, C out, D/2, H/2, W/2)."""
        assert self.bias is not None
        return first_convolution(self.passes, x_NCDHW, self.weight, self.bias, self.slope)


class CosmoFlow(nn.Module):
    """The network.

    Args:
        dropout: probability of dropping an output of a hidden dense layer in training.
        implementations: implementation by operation name; ``auto`` for operations that are not listed.
        generator: random generator of the initial weights, on the CPU. None leaves them uninitialised.
        device, dtype: device and dtype of all parameters; activations have the same dtype. Weights are drawn in fp32.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.operation.select`.
    """

    def __init__(
        self,
        architecture: CosmoFlowArchitecture,
        dropout: float = 0.0,
        implementations: Mapping[str, str] | None = None,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.architecture, self._p, self._dtype = architecture, dropout, dtype
        request = OperationRequest(torch.device(device), dtype, {"inputs": REDSHIFTS})
        chosen = {name: select(implementations or {}, name, made, request) for name, made in OPERATIONS.items()}
        self._log_counts, self._dropout = chosen["log_counts"].function, chosen["dropout"].function
        self._chosen = {name: choice.name for name, choice in chosen.items()}
        for name, narrow, wide in architecture.convolutions:
            first = name == architecture.convolutions[0][0]
            kind, operation = (FirstConvPool, "first_convolution") if first else (ConvPool, "conv_leaky_pool")
            layer = skip_init(kind, narrow, wide, KERNEL, padding=1, device=device, dtype=dtype)
            layer.passes, layer.slope = chosen[operation].function, architecture.slope
            self.add_module(name, layer.to(memory_format=torch.channels_last_3d))
        for name, inputs, outputs in architecture.dense:
            self.add_module(name, skip_init(nn.Linear, inputs, outputs, device=device, dtype=dtype))
        if generator is not None:
            self._initialise(generator)

    def chosen(self) -> dict[str, str]:
        """Return the names of the implementations by operation."""
        return dict(self._chosen)

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return names and modules in the order of the forward pass; only a module itself reads its parameters."""
        return list(self.named_children())

    def forward(self, counts_NDHWC: Tensor, seed: Tensor | None = None) -> Tensor:
        """Return estimates (N, P) in (-1.2, 1.2), at least fp32.

        Args:
            counts_NDHWC: int16.
            seed: seed of dropout, 0-d int64 on the device; only read in training with dropout.
        """
        architecture, p = self.architecture, self._p if self.training else 0.0
        x: Tensor = self._log_counts(counts_NDHWC, self._dtype)
        for name, _, _ in architecture.convolutions:
            x = self.get_submodule(name)(x)
        x = x.movedim(1, -1).flatten(1)
        for site, (name, _, _) in enumerate(architecture.dense[:-1]):
            x = F.leaky_relu(self.get_submodule(name)(x), architecture.slope)
            x = self._dropout(x, p, seed, site)
        return architecture.output_scale * widen(self.get_submodule("output")(x)).tanh()

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw Keras's initial values: weights from Glorot's uniform distribution, biases of zero."""
        for module in self.children():
            assert isinstance(module, nn.Conv3d | nn.Linear)
            outputs, inputs, *edges = module.weight.shape
            bound = math.sqrt(6 / ((inputs + outputs) * math.prod(edges)))
            drawn = torch.empty(module.weight.shape, device=generator.device)
            module.weight.copy_(drawn.uniform_(-bound, bound, generator=generator))
            assert module.bias is not None
            module.bias.zero_()
