"""The network of MiniGo, its loss, and its form for inference.

A residual network of 3x3 convolutions over the board, with a policy and a value head, as in the reference: a stem,
blocks of two convolutions with batch norm, and in each head a 1x1 convolution whose batch norm has no scale and shift.
The value is the expected outcome for black, in [-1, 1], independent of the player to move.

Shapes: B positions, C channels, P points of the board, A moves (all points, then pass), K bytes of packed planes.
Activations are (B, C, rows, columns) in channels_last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.minigo.features import PADDED_PLANES, PLANES, FeatureBits, feature_bytes
from common.config.ranges import AtLeast
from common.errors import CheckpointError
from common.nn.batch_norm import BatchNorm2d
from common.nn.choice import choose_layers
from common.nn.convolution import Conv2d, cast_weights
from common.nn.fused_convolution import FusedConv2d
from common.ops.batch_norm import BATCH_NORM
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.convolution import CONVOLUTION
from common.ops.operation import Operation
from common.ops.triton_support import widen

EPSILON = 1e-5
"""Added to the variance in every batch norm."""
MOMENTUM = 0.05
"""Weight of the statistics of a batch in the running statistics."""
POLICY_CHANNELS, VALUE_CHANNELS = 2, 1
"""Channels of the 1x1 convolutions of the heads."""
MULTIPLE = 8
"""Tensor cores want multiples of 8 half-precision channels; the inference network pads its heads to them with zeros."""

OPERATIONS: dict[str, Operation] = {
    "batch_norm": BATCH_NORM,
    "convolution_moments": CONVOLUTION,
    "conv_bias_relu": CONV_BIAS_RELU,
}
"""Operations whose implementation can be chosen in ``model.implementations``."""


@dataclass(frozen=True)
class MiniGoArchitecture:
    """Sizes of the network, all of which the rules fix.

    Attributes:
        board: lines of the board.
        blocks: residual blocks.
        width: channels of the stem and of the blocks.
        value_hidden: outputs of the hidden layer of the value head.
    """

    board: Annotated[int, AtLeast(3)]
    blocks: Annotated[int, AtLeast(1)]
    width: Annotated[int, AtLeast(1)]
    value_hidden: Annotated[int, AtLeast(1)]

    @property
    def points(self) -> int:
        """P, the points of the board."""
        return self.board**2

    @property
    def moves(self) -> int:
        """A: all points, and pass."""
        return self.points + 1

    @property
    def position_bytes(self) -> int:
        """K, the bytes of the packed planes of a position."""
        return feature_bytes(self.board)

    def forward_flops(self) -> float:
        """Return the FLOPs (2 per multiply-add) of the forward pass for one position."""
        heads = POLICY_CHANNELS + VALUE_CHANNELS
        per_point = 9 * self.width * (PLANES + 2 * self.blocks * self.width) + self.width * heads
        policy = POLICY_CHANNELS * self.points * self.moves
        value = VALUE_CHANNELS * self.points * self.value_hidden + self.value_hidden
        return 2.0 * (self.points * per_point + policy + value)

    def training_flops(self) -> float:
        """Return the FLOPs for one example: three forward passes, without the gradient of the planes."""
        return 3 * self.forward_flops() - 2.0 * 9 * self.points * PLANES * self.width


class HeadNorm(nn.Module):
    """Batch norm without scale and shift, then ReLU. Works in fp32, or fp64 for fp64 activations.

    Statistics are named as in ``torch.nn.BatchNorm2d``.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return ``relu(BN(x))``, in the shape and dtype of ``x_BCHW``."""
        y_BCHW = F.batch_norm(
            widen(x_BCHW), self.running_mean, self.running_var, None, None, self.training, MOMENTUM, EPSILON
        )
        return F.relu(y_BCHW).to(x_BCHW.dtype)


class Stem(nn.Conv2d):
    """The first convolution. It has no weights for the planes of padding, which are zero."""

    def __init__(self, width: int) -> None:
        super().__init__(PLANES, width, 3, padding=1, bias=False)

    def forward(self, planes_BCHW: Tensor) -> Tensor:
        """Map (B, PADDED_PLANES, rows, columns) to (B, C, rows, columns)."""
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, PADDED_PLANES - PLANES))
        return F.conv2d(planes_BCHW, weight.contiguous(memory_format=torch.channels_last), padding=1)


class Block(nn.Module):
    """Residual block of two convolutions. Input and result are pairs of equal values, for convolution and residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Conv2d(width, width, 3), Conv2d(width, width, 3)
        self.norm1, self.norm2 = (
            BatchNorm2d(width, True, EPSILON, MOMENTUM),
            BatchNorm2d(width, False, EPSILON, MOMENTUM),
        )

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map a pair of (B, C, rows, columns) to another one."""
        x_BCHW, residual_BCHW = pair
        y_BCHW, moments = self.conv1.with_moments(x_BCHW)
        y_BCHW, moments = self.conv2.with_moments(self.norm1(y_BCHW, moments))
        return self.norm2.add_relu(y_BCHW, residual_BCHW, moments=moments)


class MiniGo(nn.Module):
    """The network in its form for training.

    Args:
        implementations: implementation by operation name; ``auto`` for operations that are not listed.
        generator: random generator of the initial weights, on the CPU. None leaves PyTorch's initial values.
        dtype: dtype of activations, convolutions and linear layers; norms stay at least fp32.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.operation.select`.
    """

    def __init__(
        self,
        architecture: MiniGoArchitecture,
        implementations: Mapping[str, str] | None = None,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.architecture, width, points = architecture, architecture.width, architecture.points
        self.stem, self.stem_norm = Stem(width), BatchNorm2d(width, True, EPSILON, MOMENTUM)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(architecture.blocks)))
        self.policy_conv, self.policy_norm = nn.Conv2d(width, POLICY_CHANNELS, 1, bias=False), HeadNorm(POLICY_CHANNELS)
        self.policy = nn.Linear(POLICY_CHANNELS * points, architecture.moves)
        self.value_conv, self.value_norm = nn.Conv2d(width, VALUE_CHANNELS, 1, bias=False), HeadNorm(VALUE_CHANNELS)
        self.value_hidden = nn.Linear(VALUE_CHANNELS * points, architecture.value_hidden)
        self.value = nn.Linear(architecture.value_hidden, 1)
        if generator is not None:
            self._initialise(generator)
        cast_weights(self, dtype)
        self.to(device).to(memory_format=torch.channels_last)
        trunk = nn.ModuleList([self.stem_norm, self.blocks])
        kinds = {"batch_norm": BatchNorm2d, "convolution_moments": Conv2d}
        self.chosen = choose_layers(trunk, kinds, implementations or {}, dtype)

    def forward(self, planes_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the moves (B, A) and the value for black (B,), both at least fp32.

        Args:
            planes_BCHW: (B, PADDED_PLANES, rows, columns).
        """
        x_BCHW = self.stem_norm(self.stem(planes_BCHW))
        policy_BCHW, value_BCHW = self.blocks((x_BCHW, x_BCHW))
        policy_BCHW = self.policy_norm(self.policy_conv(policy_BCHW))
        logits_BA = widen(self.policy(policy_BCHW.flatten(1)))
        value_BCHW = self.value_norm(self.value_conv(value_BCHW))
        hidden = F.relu(self.value_hidden(value_BCHW.flatten(1)))
        return logits_BA, widen(self.value(hidden)).squeeze(1).tanh()

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw Keras's initial values: weights from Glorot's uniform distribution, biases of zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                outputs, inputs, *edges = module.weight.shape
                bound = math.sqrt(6 / ((inputs + outputs) * math.prod(edges)))
                module.weight.uniform_(-bound, bound, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()


def decayed(name: str) -> bool:
    """Return whether the penalty on the weights includes the parameter: kernels and scales, but no biases."""
    return not name.endswith("bias")


def losses(logits_BA: Tensor, value_B: Tensor, pi_BA: Tensor, outcome_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of the policy, and the mean squared error of the value.

    The loss is their sum, the second halved, plus the penalty ``decay * sum(w ** 2) / 2`` over the weights that
    :func:`decayed` names. Its gradient is SGD's weight decay, which the update adds.

    Args:
        pi_BA: distribution over the moves that the search found.
        outcome_B: 1 if black won, else -1.
    """
    cross_entropy = -(pi_BA * logits_BA.log_softmax(1)).sum(1).mean()
    return cross_entropy, F.mse_loss(value_B, outcome_B)


def check_weights(architecture: MiniGoArchitecture, weights: Mapping[str, Tensor]) -> None:
    """Check that ``weights`` are the tensors of a :class:`MiniGo` of these sizes.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or belongs to a larger network.
    """
    with torch.device("meta"):
        model = MiniGo(architecture, device="meta")
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in weights.items()}
    for name in [*expected, *found]:
        shape, wanted = found.get(name, "missing"), expected.get(name, "unknown")
        if shape != wanted:
            raise CheckpointError(f"a model of another network: {name} is {shape}, and in this network it is {wanted}")


class InferenceNetwork(nn.Module):
    """The network in its form for inference: batch norm is folded into the convolutions, and both heads are joined.

    The 1x1 convolutions of the heads are one convolution, and their first linear layers are one linear layer over its
    channels. Where a head does not read a channel, the weight is zero.

    Args:
        implementations: as in :class:`MiniGo`.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.operation.select`.
    """

    def __init__(
        self,
        architecture: MiniGoArchitecture,
        implementations: Mapping[str, str] | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.architecture, width = architecture, architecture.width
        outputs = architecture.moves + architecture.value_hidden
        self.stem = FusedConv2d(PADDED_PLANES, width, 3)
        self.trunk = nn.ModuleList(FusedConv2d(width, width, 3) for _ in range(2 * architecture.blocks))
        self.heads = FusedConv2d(width, MULTIPLE, 1)
        self.joined = nn.Linear(MULTIPLE * architecture.points, -(-outputs // MULTIPLE) * MULTIPLE)
        self.to(device, dtype).to(memory_format=torch.channels_last)
        accurate = torch.float64 if dtype == torch.float64 else torch.float32
        self.value = nn.Linear(architecture.value_hidden, 1, device=device, dtype=accurate)
        self.requires_grad_(False).eval()
        self.chosen = choose_layers(self, {"conv_bias_relu": FusedConv2d}, implementations or {}, dtype)
        self._features = FeatureBits(architecture.board, device)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Fold the tensors of :class:`MiniGo`, by name, in place: captured graphs use them from then on.

        Raises:
            CheckpointError: the tensors are those of another network.
        """
        architecture, points = self.architecture, self.architecture.points
        check_weights(architecture, weights)
        self._fold(self.stem, weights, "stem", "stem_norm")
        for index, layer in enumerate(self.trunk):
            number, part = divmod(index, 2)
            self._fold(layer, weights, f"blocks.{number}.conv{part + 1}", f"blocks.{number}.norm{part + 1}")
        for tensor in self.heads.parameters():
            tensor.zero_()
        policy = slice(0, POLICY_CHANNELS)
        value = slice(POLICY_CHANNELS, POLICY_CHANNELS + VALUE_CHANNELS)
        self._fold(self.heads, weights, "policy_conv", "policy_norm", policy)
        self._fold(self.heads, weights, "value_conv", "value_norm", value)
        joined = self.joined.weight.new_zeros(self.joined.out_features, points, MULTIPLE)
        moves = slice(0, architecture.moves)
        hidden = slice(architecture.moves, architecture.moves + architecture.value_hidden)
        self.joined.bias.zero_()
        for rows, channels, name in ((moves, policy, "policy"), (hidden, value, "value_hidden")):
            weight = weights[f"{name}.weight"].unflatten(1, (-1, points)).transpose(1, 2)
            joined[rows, :, channels] = weight.to(joined)
            self.joined.bias[rows] = weights[f"{name}.bias"].to(joined)
        self.joined.weight.copy_(joined.flatten(1))
        self.value.weight.copy_(weights["value.weight"])
        self.value.bias.copy_(weights["value.bias"])

    @staticmethod
    def _fold(
        layer: nn.Module, weights: Mapping[str, Tensor], convolution: str, norm: str, rows: slice = slice(None)
    ) -> None:
        """Write ``norm(convolution(x))`` into the output channels ``rows`` of a layer. Computes in fp64."""
        assert isinstance(layer, FusedConv2d)
        assert layer.bias is not None
        weight = weights[f"{convolution}.weight"].double()
        scale_C = torch.rsqrt(weights[f"{norm}.running_var"].double() + EPSILON)
        shift_C = -weights[f"{norm}.running_mean"].double() * scale_C
        if f"{norm}.weight" in weights:
            gamma_C = weights[f"{norm}.weight"].double()
            scale_C, shift_C = scale_C * gamma_C, shift_C * gamma_C + weights[f"{norm}.bias"].double()
        layer.weight[rows, : weight.shape[1]] = (weight * scale_C.view(-1, 1, 1, 1)).to(layer.weight)
        layer.weight[rows, weight.shape[1] :] = 0
        layer.bias[rows] = shift_C.to(layer.bias)

    def forward(self, bits_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of all moves (B, A), also illegal ones, and the value for black (B,), at least fp32.

        Args:
            bits_BK: packed planes, uint8.
        """
        architecture = self.architecture
        x_BCHW = self.stem(self._features.planes(bits_BK, self.stem.weight.dtype), relu=True)
        for first, second in zip(self.trunk[::2], self.trunk[1::2], strict=True):
            x_BCHW = second(first(x_BCHW, relu=True), relu=True, residual_NCHW=x_BCHW)
        heads_BF = self.heads(x_BCHW, relu=True).permute(0, 2, 3, 1).flatten(1)
        joined = widen(self.joined(heads_BF))
        hidden = joined[:, architecture.moves : architecture.moves + architecture.value_hidden].relu()
        return joined[:, : architecture.moves].softmax(1), self.value(hidden).squeeze(1).tanh()
