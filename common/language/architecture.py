"""Sizes of a decoder, the kinds of its parts, and numbers derived from them: parameters, padding, FLOPs.

Legend of the package: B rows of a micro-batch, S length of a row, T = B * S tokens, s = T / ranks tokens of one tp
rank, E hidden, H query heads, K key/value heads, D head size, F feed-forward width, V vocabulary, v words of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Positive
from common.errors import ConfigError
from common.language.norms import LayerNorm1p, Norm, RMSNorm
from common.ops import rope
from common.ops.bias_gelu import BIAS_GELU_PASSES, BiasGelu
from common.ops.operation import Operation
from common.ops.qkv_gradient import QKV_GRADIENT
from common.ops.row_norm import LAYER_NORM_1P, RMS_NORM
from common.ops.swiglu import SWIGLU


class NormKind(NamedTuple):
    """Kind of all norms of a decoder.

    Attributes:
        name: name of the operation in ``model.implementations``.
        operation: forward and backward pass of the norm, fused with the residual addition.
        module: module with the parameters, which also computes the norm under autograd.
    """

    name: str
    operation: Operation
    module: type[Norm]


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
        """See :func:`common.ops.bias_gelu.forward_reference`."""
        return self.gelu.forward(x_TF, None, **casts)

    def backward(self, dy_TF: Tensor, saved: Any, **casts: Any) -> Any:
        """See :func:`common.ops.bias_gelu.backward_reference`."""
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
        """Return the standard deviation of the initial values of a matrix, given its name in the network."""
        return self.initializer_range

    def forward_flops(self, length: int, causal: bool = True) -> float:
        """Return the FLOPs (2 per multiply-add) of the forward pass of one row, with the head.

        Args:
            length: tokens of the row.
            causal: count only the needed half of the attention; otherwise all of it, as NVIDIA and Megatron-LM do.
        """
        return self.layers * self.layer_flops(length, causal) + 2.0 * self.vocabulary * self.hidden * length

    def layer_flops(self, length: int, causal: bool = True) -> float:
        """Return the FLOPs of the forward pass of one row through one block; see :meth:`forward_flops`."""
        return 2.0 * self.products_per_layer * length + self.attention_flops(length, causal) / self.layers

    def attention_flops(self, length: int, causal: bool = True) -> float:
        """Return the part of :meth:`forward_flops` for scores and weighted sums of all layers."""
        return (2.0 if causal else 4.0) * self.layers * length * length * self.attention_features


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
