"""The network of 3D U-Net, the image segmentation benchmark.

It is the plain U-Net of Isensee et al., arXiv:1809.10483, in the variant of the MLPerf reference: downsampling by
strided convolutions, upsampling by transposed ones, instance norm and ReLU after every 3x3x3 convolution, no deep
supervision, logits of three classes.

Over several GPUs, the volume is split along D where it is large: in the input block, ``down0``, ``down1``, and from
``up2`` on. At an eighth of the size and below, every rank computes the whole volume
(:mod:`common.distributed.spatial`).

Shapes: N samples of a micro-batch, C channels, K classes, D H W volume. Channels last on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from benchmarks.unet3d.ops.instance_norm import INSTANCE_NORM
from benchmarks.unet3d.ops.output_convolution import OUTPUT_CONVOLUTION
from benchmarks.unet3d.ops.upsample import UPSAMPLE
from common.config.ranges import Positive, Range
from common.distributed.spatial.convolution import SpatialConv3d
from common.distributed.spatial.halo import HaloExchange, build_exchange
from common.distributed.spatial.split import VolumeSplit, gather_slabs, own_slab
from common.errors import ConfigError
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.operation import AUTO, OPTION, Operation, OperationRequest, asked_for, select

HALVINGS = 5
"""Number of strided convolutions; sizes must be multiples of 2**HALVINGS."""

INPUT_CHANNELS = 1
"""Input channels: the intensity of the scan."""

SPLIT_LEVELS = 3
"""First level, counted in halvings, that every rank computes whole; the decoder splits the volume again above it."""

NO_HALO = "none"


Classes = Range("3: background, kidney and tumour", lambda value: value == 3)
Filters = Range(f"{HALVINGS} positive numbers", lambda value: len(value) == HALVINGS and min(value) >= 1)


@dataclass(frozen=True)
class UNet3DArchitecture:
    """Architecture of the network.

    Attributes:
        classes: K, including the background, which is class 0.
        filters: channels of the input block and of the four levels below it; the bottleneck has as many as the last.
        norm_epsilon: added to the variance in every instance norm.
    """

    classes: Annotated[int, Classes]
    filters: Annotated[tuple[int, ...], Filters]
    norm_epsilon: Annotated[float, Positive]

    @property
    def down(self) -> list[tuple[str, int, int]]:
        """Return the downsampling blocks: name, input channels, output channels."""
        widths = [*self.filters, self.filters[-1]]
        names = [*(f"down{index}" for index in range(HALVINGS - 1)), "bottleneck"]
        return [(name, *pair) for name, pair in zip(names, itertools.pairwise(widths), strict=True)]

    @property
    def up(self) -> list[tuple[str, int, int]]:
        """Return the upsampling blocks: name, input channels, output channels."""
        return [(f"up{index}", wide, narrow) for index, (_, narrow, wide) in enumerate(reversed(self.down))]

    def check_size(self, size: tuple[int, int, int], ranks: int = 1) -> None:
        """Check that the network can compute volumes of ``size``, split over ``ranks``.

        Raises:
            ConfigError: a size is not possible; the message names the axis and the required size.
        """
        whole, slab = 2**HALVINGS, 2**SPLIT_LEVELS * ranks
        for axis, planes in zip("DHW", size, strict=True):
            if planes < whole or planes % whole:
                raise ConfigError(f"volumes of {planes} voxels along {axis}: must be a multiple of {whole}")
        if math.prod(size) == whole**3:
            raise ConfigError(
                f"volumes of {whole}³ voxels end in a single voxel, which has no instance norm; enlarge an axis"
            )
        if size[0] % slab:
            raise ConfigError(
                f"volumes of {size[0]} planes over {ranks} ranks: each rank needs a multiple of {2**SPLIT_LEVELS} of "
                f"them, so use a multiple of {math.lcm(slab, whole)} planes, or fewer ranks"
            )

    def forward_flops(self, size: tuple[int, int, int]) -> dict[str, float]:
        """Return the FLOPs (2 per multiply-add) of each block's convolutions for one sample of ``size`` = (D, H, W)."""
        voxels, first = float(math.prod(size)), self.filters[0]
        found = {"input_block": 54 * (INPUT_CHANNELS + first) * first * voxels}
        for level, (name, narrow, wide) in enumerate(self.down, 1):
            found[name] = 54 * (narrow + wide) * wide * voxels / 8**level
        for level, (name, wide, narrow) in zip(range(HALVINGS - 1, -1, -1), self.up, strict=True):
            found[name] = (2 * wide + 54 * 3 * narrow) * narrow * voxels / 8**level
        return found | {"output": 2 * first * self.classes * voxels}

    def training_flops(self, size: tuple[int, int, int]) -> float:
        """Return the FLOPs for one sample: three forward passes, without the gradient of the image."""
        image = 54 * INPUT_CHANNELS * self.filters[0] * math.prod(size)
        return 3 * sum(self.forward_flops(size).values()) - image


OPERATIONS: dict[str, Operation] = {
    "instance_norm": INSTANCE_NORM,
    "upsample": UPSAMPLE,
    "convolution": LOCAL_CONVOLUTION,
    "output_convolution": OUTPUT_CONVOLUTION,
}
"""Operations of the network. Implementations are chosen layer by layer."""


class _NetworkBuild:
    """Settings that all parts of the network share, and the names of the chosen implementations."""

    def __init__(
        self,
        architecture: UNet3DArchitecture,
        implementations: Mapping[str, str],
        halo: str,
        device: torch.device,
        dtype: torch.dtype,
        split: VolumeSplit | None,
    ) -> None:
        self.architecture, self.device, self.dtype, self.split = architecture, device, dtype, split
        self.memory_format = torch.channels_last_3d
        self._implementations = implementations
        self._exchange: HaloExchange | None = None
        self._names: dict[str, set[str]] = {**{name: set() for name in OPERATIONS}, "halo": {NO_HALO}}
        if split is not None:
            with asked_for("model.halo", halo):
                self._exchange = build_exchange(split, device, halo)
            self._names["halo"] = {self._exchange.transport.name}

    @property
    def chosen(self) -> dict[str, str]:
        """Return the names of the implementations by operation, joined by ``+`` where layers differ."""
        return {operation: "+".join(sorted(names)) for operation, names in self._names.items()}

    def convolution(self, in_channels: int, out_channels: int, stride: int, split: bool) -> SpatialConv3d:
        requested = self._implementations.get("convolution", AUTO)
        with asked_for(f"{OPTION}.convolution", requested):
            layer = SpatialConv3d(
                in_channels, out_channels, stride, exchange=self._exchange if split else None,
                implementation=requested, device=self.device, dtype=self.dtype,
            )  # fmt: skip
        self._names["convolution"].add(layer.implementation)
        return layer

    def operation(self, name: str, channels: int) -> Callable[..., Any]:
        request = OperationRequest(self.device, self.dtype, {"channels": channels})
        chosen = select(self._implementations, name, OPERATIONS[name], request)
        self._names[name].add(chosen.name)
        return chosen.function


class ConvBlock(nn.Module):
    """Convolution, instance norm and ReLU. With ``split``, inputs are this rank's slabs of volumes."""

    def __init__(self, build: _NetworkBuild, in_channels: int, out_channels: int, stride: int, split: bool) -> None:
        super().__init__()
        self.conv = build.convolution(in_channels, out_channels, stride, split)
        # Holds weight, bias and epsilon; the fused operation reads them.
        self.norm = nn.InstanceNorm3d(
            out_channels, build.architecture.norm_epsilon, affine=True, device=build.device, dtype=build.dtype
        )
        self._norm_relu: Callable[..., tuple[Tensor, Tensor]] = build.operation("instance_norm", out_channels)
        self._split = build.split if split else None

    def forward(self, x_NCDHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (N, C out, D', H', W') twice, one for each of two consumers."""
        norm = self.norm
        return self._norm_relu(self.conv(x_NCDHW), norm.weight, norm.bias, norm.eps, self._split)


class ConvPair(nn.Module):
    """Two convolution blocks, the first with ``stride``. With ``split``, inputs are this rank's slabs of volumes."""

    def __init__(self, build: _NetworkBuild, in_channels: int, out_channels: int, stride: int, split: bool) -> None:
        super().__init__()
        self.conv1 = ConvBlock(build, in_channels, out_channels, stride, split)
        self.conv2 = ConvBlock(build, out_channels, out_channels, 1, split)

    def forward(self, x_NCDHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (N, C out, D', H', W') twice, for the next block and for a skip connection."""
        x_NCDHW, _ = self.conv1(x_NCDHW)
        result: tuple[Tensor, Tensor] = self.conv2(x_NCDHW)
        return result


class UpBlock(nn.Module):
    """Upsampling by 2, concatenation of the skip connection, and two convolution blocks.

    With ``split``, inputs are this rank's slabs of volumes.
    """

    def __init__(self, build: _NetworkBuild, in_channels: int, out_channels: int, split: bool) -> None:
        super().__init__()
        transposed = skip_init(
            nn.ConvTranspose3d, in_channels, out_channels, 2, stride=2, device=build.device, dtype=build.dtype
        )
        # Holds weight and bias; the fused operation reads them.
        self.upsample = transposed.to(memory_format=build.memory_format)
        self._upsample: Callable[..., Tensor] = build.operation("upsample", out_channels)
        self.conv1 = ConvBlock(build, 2 * out_channels, out_channels, 1, split)
        self.conv2 = ConvBlock(build, out_channels, out_channels, 1, split)

    def forward(self, x_NCDHW: Tensor, skip_NCDHW: Tensor) -> Tensor:
        """Map (N, C in, D, H, W), and the skip connection of twice the size, to (N, C out, 2D, 2H, 2W)."""
        x_NCDHW, _ = self.conv1(self._upsample(x_NCDHW, self.upsample.weight, self.upsample.bias, skip_NCDHW))
        x_NCDHW, _ = self.conv2(x_NCDHW)
        return x_NCDHW


class OutputConvolution(nn.Conv3d):
    """The last convolution, computed by ``function``."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Return logits (N, K, D, H, W)."""
        assert self.bias is not None
        return self.function(x_NCDHW, self.weight, self.bias)


class UNet3D(nn.Module):
    """The network of 3D U-Net.

    Args:
        generator: random generator of the initial weights, on the CPU. None leaves them uninitialised, for models
            that are loaded or only measured.
        implementations: implementation by operation name; ``auto`` for operations that are not listed.
        halo: method by which the ranks of a split volume exchange planes.
        device, dtype: device and dtype of all parameters; activations have the same dtype. Weights are drawn in fp32.
        split: ranks that share each volume; None if every rank has whole volumes. With a split, all its ranks must
            build the network together.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.operation.select`.
    """

    def __init__(
        self,
        architecture: UNet3DArchitecture,
        generator: torch.Generator | None = None,
        *,
        implementations: Mapping[str, str] | None = None,
        halo: str = AUTO,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        split: VolumeSplit | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        split = None if split is None or split.ranks == 1 else split
        self.architecture = architecture
        self._split = split
        build = _NetworkBuild(architecture, implementations or {}, halo, device, dtype, split)
        filters = architecture.filters
        self.input_block = ConvPair(build, INPUT_CHANNELS, filters[0], 1, split=True)
        for level, (name, narrow, wide) in enumerate(architecture.down, 1):
            self.add_module(name, ConvPair(build, narrow, wide, 2, split=level < SPLIT_LEVELS))
        for level, (name, wide, narrow) in zip(range(HALVINGS - 1, -1, -1), architecture.up, strict=True):
            self.add_module(name, UpBlock(build, wide, narrow, split=level < SPLIT_LEVELS))
        self.output = skip_init(OutputConvolution, filters[0], architecture.classes, 1, device=device, dtype=dtype)
        self.output.function = build.operation("output_convolution", filters[0])
        self._chosen = build.chosen
        if generator is not None:
            self._initialise(generator)

    def chosen(self) -> dict[str, str]:
        """Return the names of the implementations by operation, joined by ``+`` where layers differ."""
        return dict(self._chosen)

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return names and modules in the order of the forward pass; only a module itself reads its parameters."""
        return list(self.named_children())

    def redundant_parameters(self) -> frozenset[str]:
        """Return names of parameters whose whole gradient every rank of a split computes; empty without a split."""
        if self._split is None:
            return frozenset()
        down = [name for name, _, _ in self.architecture.down[SPLIT_LEVELS - 1 :]]
        up = [name for name, _, _ in self.architecture.up[: HALVINGS - SPLIT_LEVELS]]
        return frozenset(name for name, _ in self.named_parameters() if name.split(".")[0] in (*down, *up))

    def forward(self, image_NCDHW: Tensor) -> Tensor:
        """Return logits (N, K, D, H, W) of volumes, or of this rank's slabs.

        Raises:
            ConfigError: a size cannot be halved often enough; the message names a possible size.
        """
        ranks = 1 if self._split is None else self._split.ranks
        D, H, W = image_NCDHW.shape[2:]
        self.architecture.check_size((D * ranks, H, W), ranks)
        x_NCDHW, skip_NCDHW = self.input_block(image_NCDHW)
        skips = []
        for level, (name, _, _) in enumerate(self.architecture.down, 1):
            skips.append(skip_NCDHW)
            if level == SPLIT_LEVELS and self._split is not None:
                x_NCDHW = gather_slabs(x_NCDHW, self._split)
            x_NCDHW, skip_NCDHW = self.get_submodule(name)(x_NCDHW)
        for level, (name, _, _) in zip(range(HALVINGS - 1, -1, -1), self.architecture.up, strict=True):
            if level == SPLIT_LEVELS - 1 and self._split is not None:
                x_NCDHW = own_slab(x_NCDHW, self._split)
            x_NCDHW = self.get_submodule(name)(x_NCDHW, skips.pop())
        logits_NKDHW: Tensor = self.output(x_NCDHW)
        return logits_NKDHW

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw weights and biases with PyTorch's bounds, U(-b, b) with b = 1 / sqrt(fan-in); norms are already set.

        As in PyTorch, the fan-in of a transposed convolution counts its output channels.
        """
        for module in self.modules():
            if not isinstance(module, SpatialConv3d | nn.ConvTranspose3d | nn.Conv3d):
                continue
            bound = 1 / math.sqrt(module.weight[0].numel())
            for parameter in module.parameters():
                drawn = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))
