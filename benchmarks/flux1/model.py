"""FLUX.1's transformer (https://github.com/black-forest-labs/flux, src/flux/model.py), which predicts the velocity.

Text and image tokens attend to each other in every block. A double block has weights for the text and weights for the
image; a single block has the same weights for both and computes attention and MLP side by side. A vector per sample,
the sum of the embedded time and the embedded caption, gives shift, scale and gate of every branch.

Initial weights are those of the MLPerf reference implementation: weights of linear layers are uniform after Glorot and
Bengio (2010), those of the embeddings of time and caption normal with standard deviation 0.02, biases are 0 and weights
of norms 1. The modulations and the output are 0, so the network first predicts 0.

The published network joins ``qkv`` and ``up`` of a single block, which read the same tokens, into one product, and
``proj`` and ``down``, whose results are added, into another. The initial weights are those of the joined products.

Ranks of ``tp`` share the products over the tokens of a block: queries, keys, values and features of the MLP are split.
Between these products, the samples of the micro-batch are divided equally: rank 0 has the first ones.

Legend: see :mod:`benchmarks.flux1.architecture`; R rows, which are the tokens of all samples, sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.ops.gated_residual import GATED_RESIDUAL
from benchmarks.flux1.ops.modulated_norm import MODULATED_NORM
from benchmarks.flux1.ops.qk_norm_rope import QK_NORM_ROPE, QkvStream
from common.distributed.tensor_parallel.layers import tensor_splits
from common.distributed.tensor_parallel.linear import LinearLayers
from common.distributed.tensor_parallel.ranks import TensorParallel, qkv_parts
from common.nn.recomputation import recomputed
from common.ops.bias_gelu import BIAS_GELU
from common.ops.dense_attention import DENSE_ATTENTION
from common.ops.linear import LINEAR, Linear
from common.ops.operation import Operation, OperationRequest, choose

OPERATIONS: dict[str, Operation] = {
    "attention": DENSE_ATTENTION,
    "modulated_norm": MODULATED_NORM,
    "gated_residual": GATED_RESIDUAL,
    "qk_norm_rope": QK_NORM_ROPE,
    "gelu": BIAS_GELU,
    "linear": LINEAR,
}
"""Operations that ``model.implementations`` can configure.

``linear`` applies to the products over tokens in the blocks; all other products are PyTorch's.
"""

EMBEDDING_STD = 0.02
"""Standard deviation of the initial weights of the embeddings of time and caption."""


@dataclass(frozen=True)
class _Operations:
    """Functions of the chosen implementations."""

    attention: Callable[..., Tensor]
    modulated_norm: Callable[..., tuple[Tensor, Any]]
    gated_residual: Callable[..., Tensor]
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gelu: Callable[..., Any]


@dataclass(frozen=True)
class _Build(LinearLayers):
    """Sizes, operations and factories that all modules of the network share."""

    shape: FluxArchitecture = field(kw_only=True)
    operations: _Operations = field(kw_only=True)

    def qkv(self) -> Linear:
        """Return the layer from tokens to queries, keys and values. Each rank of tp has whole heads."""
        heads = self.shape.heads
        return self.column(self.shape.hidden, *qkv_parts(heads, heads, self.shape.head_size, self.parallel))

    def norm_weight(self) -> nn.Parameter:
        """Return the weight of the norm of a head's queries or keys."""
        return nn.Parameter(torch.empty(self.shape.head_size, device=self.device, dtype=self.dtype))


class Rotation:
    """Cosines and sines of the angles of all tokens, (S, D / 2) each: fp32, or fp64 for an fp64 network.

    A text token has position (0, 0, 0), an image token (0, row, column). With axis a of n features, pair j of the axis
    has the angle ``position_a theta^(-2j / n)``.
    """

    def __init__(self, shape: FluxArchitecture, device: torch.device, dtype: torch.dtype) -> None:
        grid = torch.arange(shape.rows, dtype=torch.float64)
        positions_S3 = torch.zeros(shape.length, 3, dtype=torch.float64)
        positions_S3[shape.text_length :, 1:] = torch.cartesian_prod(grid, grid)
        angles = [
            torch.outer(position_S, shape.rope_theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / n))
            for position_S, n in zip(positions_S3.unbind(1), shape.rope_axes, strict=True)
        ]
        angles_SJ, compute_dtype = torch.cat(angles, 1), torch.promote_types(dtype, torch.float32)
        self.cos_SJ, self.sin_SJ = (x.to(device, compute_dtype) for x in (angles_SJ.cos(), angles_SJ.sin()))


class Embedding(nn.Module):
    """Two linear layers with SiLU between them, of the time or of the caption."""

    def __init__(self, build: _Build, features: int) -> None:
        super().__init__()
        self.first = build.whole(features, build.shape.hidden)
        self.second = build.whole(build.shape.hidden, build.shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, features) to (N, C)."""
        result: Tensor = self.second(F.silu(self.first(x.to(self.first.weight.dtype))))
        return result


class _Layers(nn.Module):
    """The layers that a single block has for all tokens, and a double block for the text and for the image.

    Args:
        tokens: tokens of a sample.
        vectors: number of vectors (shift, scale, gate, ...) that ``modulation`` gives.
        down_bias: whether the second product of the MLP has a bias.
    """

    def __init__(self, build: _Build, tokens: int, vectors: int, down_bias: bool = True) -> None:
        super().__init__()
        hidden, feed_forward = build.shape.hidden, build.shape.feed_forward
        self._operations, self._epsilon, self._tokens = build.operations, build.shape.norm_epsilon, tokens
        self.modulation = build.whole(hidden, vectors * hidden)
        self.qkv, self.proj = build.qkv(), build.row(hidden, hidden)
        self.query_norm, self.key_norm = build.norm_weight(), build.norm_weight()
        self.up, self.down = build.column(hidden, feed_forward), build.row(feed_forward, hidden, bias=down_bias)

    def heads(self, x_RC: Tensor, shift_NC: Tensor, scale_NC: Tensor) -> tuple[Tensor, Tensor, QkvStream]:
        """Return the tokens (R, C) for the residual connection and after the norm, and their queries, keys and values.

        With several ranks of tp, the queries, keys and values are the heads of this rank for the tokens of all ranks.
        """
        x_RC, y_RC = self._operations.modulated_norm(
            x_RC, scale_NC, shift_NC, self._epsilon, fp8=self.qkv.input_scaling()
        )
        (qkv_RE, handover), bias = self.qkv.without_bias(y_RC), self.qkv.bias
        assert bias is not None
        return x_RC, y_RC, QkvStream(qkv_RE, bias, self.query_norm, self.key_norm, self._tokens, handover)

    def features(self, y_RC: Tensor) -> Any:
        """Return the features of the MLP after GELU, of tokens after a norm."""
        up_RF, up = self.up.without_bias(y_RC)
        return self._operations.gelu(up_RF, self.up.bias, fp8=self.down.input_scaling(), handover=up)


class Stream(_Layers):
    """The weights of a double block for the text or for the image.

    ``modulation`` gives shift, scale and gate of the attention, then those of the MLP.
    """

    def __init__(self, build: _Build, tokens: int) -> None:
        super().__init__(build, tokens, vectors=6)

    def finish(self, x_RC: Tensor, attended_RC: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Return the tokens after the output product of the attention, and after the MLP.

        Args:
            x_RC: tokens from :meth:`heads`.
            attended_RC: the heads of the attention's result side by side.
            vectors: gate of the attention, and shift, scale and gate of the MLP, (N, C) each.
        """
        operations, (gate_NC, shift_NC, scale_NC, mlp_gate_NC) = self._operations, vectors
        y_RC, proj = self.proj.without_bias(attended_RC)
        x_RC = operations.gated_residual(x_RC, y_RC, None, self.proj.bias, gate_NC, handovers=(proj,))
        x_RC, y_RC = operations.modulated_norm(x_RC, scale_NC, shift_NC, self._epsilon, fp8=self.up.input_scaling())
        y_RC, down = self.down.without_bias(self.features(y_RC))
        return operations.gated_residual(x_RC, y_RC, None, self.down.bias, mlp_gate_NC, handovers=(down,))


class DoubleBlock(nn.Module):
    """Attention over text and image, then an MLP; each of them has its own weights."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        shape = build.shape
        self.text, self.image = Stream(build, shape.text_length), Stream(build, shape.image_length)
        self._operations, self._epsilon = build.operations, shape.norm_epsilon
        self._tokens = [shape.text_length, shape.image_length]

    def forward(
        self, text_RC: Tensor, image_RC: Tensor, vector_NC: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of text and image.

        Args:
            text_RC, image_RC: tokens, (N T, C) and (N L, C), as the results.
            vector_NC: SiLU of the vector of every sample.
        """
        of_text, of_image = (stream.modulation(vector_NC).chunk(6, -1) for stream in (self.text, self.image))
        text_RC, _, text_heads = self.text.heads(text_RC, *of_text[:2])
        image_RC, _, image_heads = self.image.heads(image_RC, *of_image[:2])
        heads = self._operations.qk_norm_rope(
            (text_heads, image_heads), rotation.cos_SJ, rotation.sin_SJ, self._epsilon
        )
        attended_NSC = self._operations.attention(*heads).flatten(2)
        attended_text_RC, attended_image_RC = (x.flatten(0, 1) for x in attended_NSC.split(self._tokens, 1))
        return (
            self.text.finish(text_RC, attended_text_RC, of_text[2:]),
            self.image.finish(image_RC, attended_image_RC, of_image[2:]),
        )


class SingleBlock(_Layers):
    """Attention and an MLP side by side, over text and image with the same weights.

    ``proj`` has the bias of both results. ``modulation`` gives shift, scale and gate.
    """

    def __init__(self, build: _Build) -> None:
        super().__init__(build, build.shape.length, vectors=3, down_bias=False)

    def forward(self, x_RC: Tensor, vector_NC: Tensor, rotation: Rotation) -> Tensor:
        """Return the tokens of text and image.

        Args:
            x_RC: tokens, (N S, C), as the result; the text comes first in each sample.
            vector_NC: SiLU of the vector of every sample.
        """
        operations = self._operations
        shift_NC, scale_NC, gate_NC = self.modulation(vector_NC).chunk(3, -1)
        x_RC, y_RC, heads = self.heads(x_RC, shift_NC, scale_NC)
        q_NSHD, k_NSHD, v_NSHD = operations.qk_norm_rope((heads,), rotation.cos_SJ, rotation.sin_SJ, self._epsilon)
        attended_RC = operations.attention(q_NSHD, k_NSHD, v_NSHD).flatten(2).flatten(0, 1)
        h_RF = self.features(y_RC)
        attention_RC, proj = self.proj.without_bias(attended_RC)
        mlp_RC, down = self.down.without_bias(h_RF)
        return operations.gated_residual(x_RC, attention_RC, mlp_RC, self.proj.bias, gate_NC, handovers=(proj, down))


class Output(nn.Module):
    """Modulated norm and linear layer of the image tokens; ``modulation`` gives shift and scale."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        hidden = build.shape.hidden
        self._operations, self._epsilon = build.operations, build.shape.norm_epsilon
        self.modulation, self.linear = build.whole(hidden, 2 * hidden), build.whole(hidden, build.shape.packed)

    def forward(self, image_RC: Tensor, vector_NC: Tensor) -> Tensor:
        """Return the velocity (N, L, P)."""
        shift_NC, scale_NC = self.modulation(vector_NC).chunk(2, -1)
        _, y_RC = self._operations.modulated_norm(image_RC, scale_NC, shift_NC, self._epsilon)
        velocity_RP: Tensor = self.linear(y_RC)
        return velocity_RP.unflatten(0, (len(vector_NC), -1))


class Flux(nn.Module):
    """The transformer.

    Args:
        implementations: ``model.implementations``; None for ``auto`` everywhere.
        generator_of: returns the random generator of the initial values of a parameter, given its name. They are drawn
            in fp32 on its device. None leaves the parameters uninitialised, for models that are loaded or counted.
        device, dtype: device and dtype of all parameters; activations have the same dtype.
        parallel: ranks that share the products over tokens. Between the products, each rank has some of the samples.
        recomputed_blocks: number of blocks, from the first, whose activations the backward pass recomputes.
        recomputed_operations: number of the following blocks that recompute all activations but results of products.
        zero_std: standard deviation of normal values that replace zeros of the initial weights; 0 keeps the zeros.

    Attributes:
        chosen: names of the chosen implementations by operation.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
        ConfigError: the number of ranks does not divide heads or features.
    """

    def __init__(
        self,
        architecture: FluxArchitecture,
        implementations: Mapping[str, str] | None = None,
        generator_of: Callable[[str], torch.Generator] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        parallel: TensorParallel | None = None,
        *,
        recomputed_blocks: int = 0,
        recomputed_operations: int = 0,
        zero_std: float = 0.0,
    ) -> None:
        super().__init__()
        device, shape, parallel = torch.device(device), architecture, parallel or TensorParallel()
        sizes = {"columns": shape.hidden, "features": shape.hidden, "head_size": shape.head_size}
        sizes |= {"queries": shape.length, "keys": shape.length}
        chosen = choose(implementations or {}, OPERATIONS, OperationRequest(device, dtype, sizes))
        operations = _Operations(**{name: choice.function for name, choice in chosen.items() if name != "linear"})
        build = _Build(chosen["linear"].name, device, dtype, parallel, shape=shape, operations=operations)
        self.architecture, self._dtype = shape, dtype
        self.chosen = {name: choice.name for name, choice in chosen.items()}
        self._recomputed = (recomputed_blocks, recomputed_blocks + recomputed_operations)
        self._rotation = Rotation(shape, device, dtype)
        self.image_in, self.text_in = (build.whole(n, shape.hidden) for n in (shape.packed, shape.text_width))
        self.time_in, self.caption_in = (Embedding(build, n) for n in (shape.time_features, shape.caption_width))
        self.double_blocks = nn.ModuleList(DoubleBlock(build) for _ in range(shape.double_blocks))
        self.single_blocks = nn.ModuleList(SingleBlock(build) for _ in range(shape.single_blocks))
        self.output = Output(build)
        if generator_of is not None:
            self._draw(generator_of, zero_std)

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Names and modules in the order of the forward pass; each reads only its own parameters."""
        first = ("time_in", "caption_in", "image_in", "text_in")
        middle = [f"{kind}.{i}" for kind in ("double_blocks", "single_blocks") for i in range(len(getattr(self, kind)))]
        return [(name, self.get_submodule(name)) for name in (*first, *middle, "output")]

    def forward(self, x_NLP: Tensor, text_NTK: Tensor, caption_NK: Tensor, t_N: Tensor) -> Tensor:
        """Predict the velocity of this rank's N samples; with several ranks of tp, each has as many. Collective.

        Args:
            x_NLP: noised and packed latents.
            text_NTK: encoded tokens of the captions.
            caption_NK: whole encoded captions.
            t_N: times from 0 to 1, fp32 or fp64.

        Returns:
            (N, L, P), dtype of the parameters.
        """
        shape, rotation, dtype = self.architecture, self._rotation, self._dtype
        times_NK = time_features(t_N, shape.time_features, shape.time_period, shape.time_scale)
        vector_NC = F.silu(self.time_in(times_NK) + self.caption_in(caption_NK))
        image_RC = self.image_in(x_NLP.to(dtype).flatten(0, 1))
        text_RC = self.text_in(text_NTK.to(dtype).flatten(0, 1))
        for number, block in enumerate(self.double_blocks):
            text_RC, image_RC = self._run(number, block, text_RC, image_RC, vector_NC, rotation)
        text_NTC, image_NLC = (x.unflatten(0, (len(vector_NC), -1)) for x in (text_RC, image_RC))
        x_RC = torch.cat([text_NTC, image_NLC], 1).flatten(0, 1)
        for number, block in enumerate(self.single_blocks, len(self.double_blocks)):
            x_RC = self._run(number, block, x_RC, vector_NC, rotation)
        image_NLC = x_RC.unflatten(0, (len(vector_NC), -1))[:, shape.text_length :]
        velocity_NLP: Tensor = self.output(image_NLC.flatten(0, 1), vector_NC)
        return velocity_NLP

    def _run(self, number: int, block: nn.Module, *inputs: object) -> Any:
        end_of_whole_blocks, end_of_operations = self._recomputed
        keeps_products = number >= end_of_whole_blocks
        return recomputed(block, *inputs, recompute=number < end_of_operations, keep_products=keeps_products)

    @torch.no_grad()
    def _draw(self, generator_of: Callable[[str], torch.Generator], zero_std: float) -> None:
        splits = tensor_splits(self)
        for name, parameter in self.named_parameters():
            if name.endswith("_norm"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                generator, split = generator_of(name), splits.get(name)
                drawn = torch.empty(split.full_shape if split else parameter.shape, device=generator.device)
                if ".modulation." in name or name.startswith("output."):
                    drawn.normal_(0.0, zero_std, generator=generator)
                elif name.startswith(("time_in.", "caption_in.")):
                    drawn.normal_(0.0, EMBEDDING_STD, generator=generator)
                else:
                    bound = math.sqrt(6.0 / (sum(drawn.shape) + self._joined_features(name)))
                    drawn.uniform_(-bound, bound, generator=generator)
                parameter.copy_(split.local_of(drawn) if split else drawn)

    def _joined_features(self, name: str) -> int:
        """Return the inputs or outputs of the product that the published network joins with one of a single block."""
        if not name.startswith("single_blocks."):
            return 0
        hidden, feed_forward = self.architecture.hidden, self.architecture.feed_forward
        joined = {"qkv": feed_forward, "up": 3 * hidden, "proj": feed_forward, "down": hidden}
        return joined[name.split(".")[-2]]


def parameter_count(architecture: FluxArchitecture, parallel: TensorParallel | None = None) -> int:
    """Return the number of parameters of a rank, without allocating them."""
    return sum(each.numel() for each in Flux(architecture, device="meta", parallel=parallel).parameters())


def time_features(t_N: Tensor, features: int, period: float, scale: float) -> Tensor:
    """Return cosines, then sines, of ``scale t period^(-2j / features)``: (N, features), dtype of ``t_N``."""
    half = features // 2
    powers = torch.arange(half, dtype=torch.float64, device=t_N.device) / half
    angles_NJ = scale * t_N.unsqueeze(1) * torch.exp(-math.log(period) * powers).to(t_N.dtype)
    return torch.cat([angles_NJ.cos(), angles_NJ.sin()], 1)
