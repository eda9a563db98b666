"""Sizes of a decoder, the kinds of its parts, its norms, and derived numbers: parameters, padding, FLOPs.

Legend of the package: B rows of a micro-batch, S length of a row, T = B * S tokens, s = T / ranks tokens of one tp
rank, E hidden, H query heads, K key/value heads, D head size, F feed-forward width, V vocabulary, v words of one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Positive
from common.distributed.context_parallel import ContextSplit, SplitAttention
from common.distributed.tensor_parallel.ranks import AXIS
from common.errors import ConfigError
from common.ops import rope
from common.ops.bias_gelu import BIAS_GELU_PASSES, BiasGelu
from common.ops.bias_gradient import BIAS_GRADIENT, RowSums
from common.ops.causal_attention import CAUSAL_ATTENTION
from common.ops.lora_input import LORA_INPUT
from common.ops.operation import AUTO, Operation, OperationRequest, choose
from common.ops.qkv_gradient import QKV_GRADIENT
from common.ops.row_norm import LAYER_NORM_1P, RMS_NORM, RowNorm
from common.ops.swiglu import SWIGLU
from common.ops.triton_support import widen


class DecoderNorm(nn.Module, ABC):
    """Norm of the last dimension.

    Args:
        features: size of the last dimension.
        epsilon: added to the variance or to the mean square.

    Attributes:
        partial_over: parameters whose gradients must be summed over mesh axes. Each tp rank normalises only its own
            tokens and has only their part of the parameters' gradients.
        initial: initial value of the weight; a bias starts with 0.
    """

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,)}
    initial: ClassVar[float] = 1.0
    has_bias: ClassVar[bool] = False
    bias: nn.Parameter | None

    def __init__(self, features: int, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if self.has_bias else None
        self.register_parameter("bias", bias)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over the last dimension, in its shape and dtype. Arithmetic is at least fp32."""


class RMSNorm(DecoderNorm):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` (Zhang and Sennrich, arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over the last dimension, in its shape and dtype. Arithmetic is at least fp32."""
        x_fp32 = widen(x)
        normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * widen(self.weight)).to(x.dtype)


class LayerNorm1p(DecoderNorm):
    """LayerNorm ``(x - mean) / sqrt(variance + epsilon) * (1 + weight) + bias``."""

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,), "bias": (AXIS,)}
    initial: ClassVar[float] = 0.0
    has_bias: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over the last dimension, in its shape and dtype. Arithmetic is at least fp32."""
        assert self.bias is not None
        x_fp32, weight, bias = widen(x), widen(self.weight), widen(self.bias)
        return F.layer_norm(x_fp32, (x_fp32.shape[-1],), 1.0 + weight, bias, self.epsilon).to(x.dtype)


class NormKind(NamedTuple):
    """Kind of all norms of a decoder.

    Attributes:
        name: name of the operation in ``model.implementations``.
        operation: forward and backward pass of the norm, fused with the residual addition.
        module: module with the parameters, which also computes the norm under autograd.
    """

    name: str
    operation: Operation
    module: type[DecoderNorm]


class Activation(NamedTuple):
    """Activation of the MLP.

    Attributes:
        name, operation: see :class:`NormKind`.
        first: name of the MLP's first layer.
        parts: the first layer has ``parts * F`` outputs; 2 with a gate.
        function: the activation of fp32 values (T, parts * F), for autograd.
        passes: turns the function of the operation into one with ``forward(x, **casts)`` and ``backward(dy, saved,
            fp8=...)``, which returns dx in 16 bits and in FP8 (one is None), and the gradient of a bias if it has one.
    """

    name: str
    operation: Operation
    first: str
    parts: int
    function: Callable[[Tensor], Tensor]
    passes: Callable[[Any], Any]


@dataclass(frozen=True)
class GeluPasses:
    """GELU of a product that has already added its bias."""

    gelu: BiasGelu

    def forward(self, x_TF: Tensor, **casts: Any) -> Any:
        """Return ``gelu(x)``, (T, F), and the tensor to save; see :func:`common.ops.bias_gelu.forward_reference`."""
        return self.gelu.forward(x_TF, None, **casts)

    def backward(self, dy_TF: Tensor, saved: Any, **casts: Any) -> Any:
        """Return the gradients of x and of the bias; see :func:`common.ops.bias_gelu.backward_reference`."""
        return self.gelu.backward(dy_TF, saved, None, **casts)


def _swiglu(gate_up_TF: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_TF.chunk(2, -1)
    return F.silu(gate_TF) * up_TF


def _gelu(up_TF: Tensor) -> Tensor:
    return F.gelu(up_TF, approximate="tanh")


RMS = NormKind("rms_norm", RMS_NORM, RMSNorm)
LAYER_1P = NormKind("layer_norm", LAYER_NORM_1P, LayerNorm1p)
SWIGLU_MLP = Activation("swiglu", SWIGLU, "gate_up", 2, _swiglu, lambda swiglu: swiglu)
GELU_MLP = Activation("bias_gelu", BIAS_GELU_PASSES, "up", 1, _gelu, GeluPasses)


class Architecture:
    """Sizes and kinds of a decoder. A subclass is a dataclass that has the sizes as fields or properties.

    Attributes:
        kv_heads: K, a divisor of H.
        positions: number of learned positions; 0 for rotary positions.
        norm_epsilon: added to the mean square, or to the variance, in every norm.
        initializer_range: standard deviation of initial weights.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    positions: int
    norm_epsilon: float
    initializer_range: float

    norm: ClassVar[NormKind] = RMS
    activation: ClassVar[Activation] = SWIGLU_MLP
    rotary: ClassVar[bool] = True
    """Rotary positions, and QKV rows sorted by kind: all queries, keys, values. Otherwise learned positions, and rows
    sorted by head: query, key and value of the first head, then of the second."""
    biases: ClassVar[bool] = False
    """Whether the linear layers of the blocks have biases. The hand-written backward passes of :data:`GELU_MLP` and of
    learned positions compute their gradients, and no others do."""
    tied_head: ClassVar[bool] = False
    """Whether the head shares the weight of the embedding."""
    words_per_rank: ClassVar[int] = 1
    """The number of words of each tp rank is padded to a multiple of this; 1 for no padding."""
    mlp: ClassVar[type[nn.Module] | None] = None
    """Another MLP: a module that is built from a :class:`common.language.network.Building` and maps normalised hidden
    states (s, E) to (s, E). Autograd then builds its backward pass. None for the MLP with :attr:`activation`."""

    @classmethod
    def operations(cls) -> dict[str, Operation]:
        """Return the operations of norms, positions and activation, by their names in ``model.implementations``."""
        positions = {"rope": rope.ROPE} if cls.rotary else {"qkv_gradient": QKV_GRADIENT}
        mlp = {cls.activation.name: cls.activation.operation} if cls.mlp is None else {}
        return {cls.norm.name: cls.norm.operation, **positions, **mlp}

    @property
    def qkv_features(self) -> int:
        """(H + 2 K) D: rows of the QKV weight."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def attention_features(self) -> int:
        """H D: features of the attention's result."""
        return self.heads * self.head_size

    @property
    def products_per_layer(self) -> int:
        """Number of weights in the matrix products of one block."""
        mlp = (self.activation.parts + 1) * self.feed_forward
        return self.hidden * (self.qkv_features + self.attention_features + mlp)

    @property
    def norm_parameters(self) -> int:
        """Number of parameters of one norm."""
        return self.hidden * (2 if self.norm.module.has_bias else 1)

    @property
    def parameters_per_layer(self) -> int:
        """Number of all parameters of one block, without adapters."""
        biases = self.qkv_features + 2 * self.hidden + self.activation.parts * self.feed_forward
        return self.products_per_layer + (biases if self.biases else 0) + 2 * self.norm_parameters

    @property
    def parameters(self) -> int:
        """Number of all parameters, without adapters and padding."""
        words = self.vocabulary * self.hidden * (1 if self.tied_head else 2)
        positions = 0 if self.rotary else self.positions * self.hidden
        return self.layers * self.parameters_per_layer + words + positions + self.norm_parameters

    def padded_vocabulary(self, ranks: int) -> int:
        """Return the rows of the embedding table, with padding, if ``ranks`` ranks share it."""
        step = self.words_per_rank * ranks if self.words_per_rank > 1 else 1
        return -(-self.vocabulary // step) * step

    @property
    def rope_scaling(self) -> rope.RopeScaling | None:
        """Scaling of the rotation frequencies. None means no scaling; subclasses may override this."""
        return None

    def rope_tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return cosines and sines of the rotation, each of shape (T, D / 2); None for learned positions."""
        return None, None

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of the matrix ``name``. Default: one for all matrices."""
        return self.initializer_range

    def forward_flops(self, length: int) -> float:
        """Return the FLOPs (2 per multiply-add) of the forward pass of one row of ``length`` tokens, with the head.

        Only the needed half of the attention counts. (NVIDIA and Megatron-LM count all of it.)
        """
        return self.layers * self.layer_flops(length) + 2.0 * self.vocabulary * self.hidden * length

    def layer_flops(self, length: int) -> float:
        """Return the FLOPs of the forward pass of one row through one block; see :meth:`forward_flops`."""
        return 2.0 * self.products_per_layer * length + self.attention_flops(length) / self.layers

    def attention_flops(self, length: int) -> float:
        """Return the part of :meth:`forward_flops` for scores and weighted sums of all layers."""
        return 2.0 * self.layers * length * length * self.attention_features


@dataclass(frozen=True)
class LlamaArchitecture(Architecture):
    """Decoder of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, a separate head.

    Touvron et al., arXiv:2302.13971 and 2307.09288. The rotation pairs dimension i of a head with i + D/2. One matrix
    product computes query, key and value, another one gate and up.

    Attributes:
        head_size: D, an even number.
        rope_base: base of the rotation's wavelengths.

    Raises:
        ConfigError: K does not divide H, or D is odd.
    """

    vocabulary: Annotated[int, AtLeast(1)]
    hidden: Annotated[int, AtLeast(1)]
    layers: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    kv_heads: Annotated[int, AtLeast(1)]
    head_size: Annotated[int, AtLeast(2)]
    feed_forward: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, Positive]
    rope_base: Annotated[float, Positive]
    initializer_range: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads}: a divisor of heads={self.heads}")
        if self.head_size % 2:
            raise ConfigError(f"head_size={self.head_size}: an even number, as the rotation pairs dimensions")

    def rope_tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotation, each of shape (T, D / 2)."""
        return rope.tables(positions_T, self.head_size, self.rope_base, self.rope_scaling)


@dataclass(frozen=True)
class TokenPositions:
    """Positions of this rank's tokens.

    Attributes:
        rows: number of rows of the micro-batch.
        in_row: int64 (T,), position of each token in its row.
        in_batch: int64 (T,), index of each token in the whole micro-batch of all ranks that share it, row after row.
        seed: 0-d int64, seed of the dropout; None for no dropout (evaluation).
    """

    rows: int
    in_row: Tensor
    in_batch: Tensor
    seed: Tensor | None = None

    @classmethod
    def of(cls, rows: int, length: int, kept_S: Tensor, seed: Tensor | None = None) -> TokenPositions:
        """Return the positions of some tokens of each row.

        Args:
            length: tokens of a whole row.
            kept_S: int64, columns of the tokens of this rank, the same in every row.
            seed: seed of the dropout; None for no dropout.
        """
        starts = torch.arange(rows, device=kept_S.device).unsqueeze(1) * length
        return cls(rows, kept_S.repeat(rows), (starts + kept_S).flatten(), seed)

    @classmethod
    def whole(
        cls, rows: int, length: int, seed: Tensor | None = None, device: torch.device | None = None
    ) -> TokenPositions:
        """Return the positions for whole rows.

        Args:
            length: tokens of a row.
            seed: seed of the dropout; None for no dropout.
        """
        return cls.of(rows, length, torch.arange(length, device=device), seed)


@dataclass(frozen=True)
class Tokens:
    """What the halves of all blocks read about the tokens of a micro-batch.

    Attributes:
        rows: B.
        inference: whether no gradients are needed, so that nothing is kept and FP8 scales rest.
        in_batch: (T,), as in :class:`TokenPositions`; ``own_in_batch``: (s,), that of this rank's own tokens.
        cos, sin: tables of the rotation, (T, D / 2) each; None without a rotation.
        seed: seed of the adapters' dropout; None for no dropout.
    """

    rows: int
    inference: bool
    in_batch: Tensor
    own_in_batch: Tensor
    cos: Tensor | None
    sin: Tensor | None
    seed: Tensor | None


Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class DecoderOperations:
    """Chosen implementations; :mod:`common.ops` has their signatures.

    Attributes:
        positions: the rotation, or the operation that joins the gradients of query, key and value.
        activation: the passes of the activation, see :class:`common.language.architecture.Activation`.
        lora_input: input of the adapters.
        bias_gradient: computes the bias gradient of the last product in a part of the network.
    """

    attention: SplitAttention
    norm: RowNorm
    positions: Any
    activation: Any
    lora_input: Any
    bias_gradient: RowSums


def block_operations(architecture: type[Architecture], adapters: bool = False) -> dict[str, Operation]:
    """Return the operations of the blocks by name, as in ``model.implementations``.

    Args:
        adapters: include the operation that only LoRA adapters need.
    """
    lora: dict[str, Operation] = {"lora_input": LORA_INPUT} if adapters else {}
    return {"attention": CAUSAL_ATTENTION, **architecture.operations(), **lora}


def choose_operations(
    requested: Mapping[str, str],
    architecture: Architecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
    adapters: bool = False,
) -> tuple[DecoderOperations, dict[str, str]]:
    """Choose an implementation of each operation of the blocks.

    Args:
        requested: ``model.implementations``.
        split: how rows are split over the cp ranks.
        adapters: whether the blocks have LoRA adapters.

    Returns:
        The operations, and the name of each one's implementation.

    Raises:
        UnsupportedImplementation: the message names ``model.implementations.<operation>``.
    """
    shape = architecture
    request = OperationRequest(device, dtype, {"features": shape.hidden, "head_size": shape.head_size})
    chosen = choose(requested, block_operations(type(shape), adapters), request)
    functions = {name: choice.function for name, choice in chosen.items()}
    activation = functions.get(shape.activation.name)
    operations = DecoderOperations(
        SplitAttention(functions["attention"], shape.head_size**-0.5, split),
        functions[shape.norm.name],
        functions["rope" if shape.rotary else "qkv_gradient"],
        None if activation is None else shape.activation.passes(activation),
        functions.get("lora_input"),
        BIAS_GRADIENT.select(AUTO, request).function,
    )
    return operations, {name: choice.name for name, choice in chosen.items()}
