"""FLUX.1's transformer (https://github.com/black-forest-labs/flux, src/flux/model.py), which predicts the velocity.

Text and image tokens attend to each other in every block. A double block has weights for the text and weights for the
image; a single block has the same weights for both and computes attention and MLP side by side. A vector per sample,
the sum of the embedded time and the embedded caption, gives shift, scale and gate of every branch.

Initial weights are those of the MLPerf reference implementation: weights of linear layers are uniform after Glorot and
Bengio (2010), those of the embeddings of time and caption normal with standard deviation 0.02, biases are 0 and weights
of norms 1. The modulations and the output are 0, so the network first predicts 0.

Legend: see :mod:`benchmarks.flux1.architecture`; R = N L rows of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.operations import Operations, Part, choose_operations
from common.ops.linear import Linear

EMBEDDING_STD = 0.02
"""Standard deviation of the initial weights of the embeddings of time and caption."""


@dataclass(frozen=True)
class _Build:
    """Sizes, operations and factories that all modules of the network share."""

    shape: FluxArchitecture
    operations: Operations
    device: torch.device
    dtype: torch.dtype

    def linear(self, in_features: int, out_features: int) -> Linear:
        """Return a layer that every rank computes with PyTorch: of inputs, vectors and output."""
        return Linear(in_features, out_features, self.device, self.dtype)

    def product(self, in_features: int, out_features: int) -> Linear:
        """Return a layer over the tokens of a block."""
        layer = self.linear(in_features, out_features)
        layer.choose(self.operations.linear)
        return layer

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
        angles_SJ, wide = torch.cat(angles, 1), torch.promote_types(dtype, torch.float32)
        self.cos_SJ, self.sin_SJ = (x.to(device, wide) for x in (angles_SJ.cos(), angles_SJ.sin()))


class Embedding(nn.Module):
    """Two linear layers with SiLU between them, of the time or of the caption."""

    def __init__(self, build: _Build, features: int) -> None:
        super().__init__()
        self.first = build.linear(features, build.shape.hidden)
        self.second = build.linear(build.shape.hidden, build.shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, features) to (N, C)."""
        result: Tensor = self.second(F.silu(self.first(x.to(self.first.weight.dtype))))
        return result


class Stream(nn.Module):
    """The weights of a double block for the text or for the image.

    ``modulation`` gives shift, scale and gate of the attention, then those of the MLP.
    """

    def __init__(self, build: _Build) -> None:
        super().__init__()
        C, F = build.shape.hidden, build.shape.feed_forward
        self._operations, self._epsilon = build.operations, build.shape.norm_epsilon
        self.modulation = build.linear(C, 6 * C)
        self.qkv = build.product(C, 3 * C)
        self.query_norm, self.key_norm = build.norm_weight(), build.norm_weight()
        self.output = build.product(C, C)
        self.up, self.down = build.product(C, F), build.product(F, C)

    def heads(self, x_NLC: Tensor, shift_NC: Tensor, scale_NC: Tensor) -> Part:
        """Return queries, keys and values of the tokens."""
        rows_RC = self._operations.modulated_norm(x_NLC, shift_NC, scale_NC, self._epsilon)
        return Part(self.qkv(rows_RC), self.query_norm, self.key_norm)

    def finish(self, x_NLC: Tensor, attended_NLC: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Return the tokens after the output product of the attention, and after the MLP.

        Args:
            attended_NLC: the heads of the attention's result side by side.
            vectors: gate of the attention, and shift, scale and gate of the MLP, (N, C) each.
        """
        operations = self._operations
        gate_NC, shift_NC, scale_NC, mlp_gate_NC = vectors
        y_RC = self.output(attended_NLC.flatten(0, 1), add_bias=False)
        x_NLC = operations.gated_add(x_NLC, y_RC, self.output.bias, gate_NC)
        rows_RC = operations.modulated_norm(x_NLC, shift_NC, scale_NC, self._epsilon)
        h_RF = operations.gelu(self.up(rows_RC, add_bias=False), self.up.bias)
        return operations.gated_add(x_NLC, self.down(h_RF, add_bias=False), self.down.bias, mlp_gate_NC)


class DoubleBlock(nn.Module):
    """Attention over text and image, then an MLP; each of them has its own weights."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        self.text, self.image = Stream(build), Stream(build)
        self._operations, self._epsilon = build.operations, build.shape.norm_epsilon

    def forward(
        self, text_NTC: Tensor, image_NLC: Tensor, vector_NC: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of text and image; ``vector_NC``: SiLU of the vector of every sample."""
        of_text, of_image = (x.modulation(vector_NC).chunk(6, -1) for x in (self.text, self.image))
        parts = (self.text.heads(text_NTC, *of_text[:2]), self.image.heads(image_NLC, *of_image[:2]))
        qkv_NS3HD = self._operations.rotated_heads(
            parts, len(vector_NC), rotation.cos_SJ, rotation.sin_SJ, self._epsilon
        )
        attended_NSC = self._operations.attention.packed(qkv_NS3HD).flatten(2)
        attended_NTC, attended_NLC = attended_NSC.split([text_NTC.shape[1], image_NLC.shape[1]], 1)
        return (
            self.text.finish(text_NTC, attended_NTC, of_text[2:]),
            self.image.finish(image_NLC, attended_NLC, of_image[2:]),
        )


class SingleBlock(nn.Module):
    """Attention and an MLP side by side, over text and image with the same weights.

    The product ``first`` gives queries, keys and values, then the input of GELU. The product ``second`` reads the
    attention's result, then that of GELU.
    """

    def __init__(self, build: _Build) -> None:
        super().__init__()
        C, F = build.shape.hidden, build.shape.feed_forward
        self._operations, self._epsilon, self._widths = build.operations, build.shape.norm_epsilon, (3 * C, F)
        self.modulation = build.linear(C, 3 * C)
        self.first, self.second = build.product(C, 3 * C + F), build.product(C + F, C)
        self.query_norm, self.key_norm = build.norm_weight(), build.norm_weight()

    def forward(self, x_NSC: Tensor, vector_NC: Tensor, rotation: Rotation) -> Tensor:
        """Return the tokens of text and image; ``vector_NC``: SiLU of the vector of every sample."""
        operations = self._operations
        shift_NC, scale_NC, gate_NC = self.modulation(vector_NC).chunk(3, -1)
        rows_RC = operations.modulated_norm(x_NSC, shift_NC, scale_NC, self._epsilon)
        qkv_RE, h_RF = self.first(rows_RC).split(self._widths, -1)
        part = Part(qkv_RE, self.query_norm, self.key_norm)
        qkv_NS3HD = operations.rotated_heads(
            (part,), len(vector_NC), rotation.cos_SJ, rotation.sin_SJ, self._epsilon
        )
        attended_RC = operations.attention.packed(qkv_NS3HD).flatten(2).flatten(0, 1)
        joined = torch.cat([attended_RC, F.gelu(h_RF, approximate="tanh")], 1)
        y_RC = self.second(joined, add_bias=False)
        return operations.gated_add(x_NSC, y_RC, self.second.bias, gate_NC)


class Output(nn.Module):
    """Modulated norm and linear layer of the image tokens; ``modulation`` gives shift and scale."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        C = build.shape.hidden
        self._operations, self._epsilon = build.operations, build.shape.norm_epsilon
        self.modulation, self.linear = build.linear(C, 2 * C), build.linear(C, build.shape.packed)

    def forward(self, image_NLC: Tensor, vector_NC: Tensor) -> Tensor:
        """Return the velocity (N, L, P)."""
        shift_NC, scale_NC = self.modulation(vector_NC).chunk(2, -1)
        rows_RC = self._operations.modulated_norm(image_NLC, shift_NC, scale_NC, self._epsilon)
        velocity_RP: Tensor = self.linear(rows_RC)
        return velocity_RP.unflatten(0, image_NLC.shape[:2])


class Flux(nn.Module):
    """The transformer.

    Args:
        implementations: ``model.implementations``; None for ``auto`` everywhere.
        generator_of: returns the random generator of the initial values of a parameter, given its name. They are drawn
            in fp32 on its device. None leaves the parameters uninitialised, for models that are loaded or counted.
        device, dtype: device and dtype of all parameters; activations have the same dtype.
        recomputed_blocks: number of blocks, from the first, whose activations the backward pass recomputes.
        zero_std: standard deviation of normal values that replace zeros of the initial weights; 0 keeps the zeros.

    Attributes:
        chosen: names of the chosen implementations by operation.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """

    def __init__(
        self,
        architecture: FluxArchitecture,
        implementations: Mapping[str, str] | None = None,
        generator_of: Callable[[str], torch.Generator] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        recomputed_blocks: int = 0,
        zero_std: float = 0.0,
    ) -> None:
        super().__init__()
        device, shape = torch.device(device), architecture
        build = _Build(shape, choose_operations(implementations or {}, shape, device, dtype), device, dtype)
        self.architecture, self.chosen, self._dtype = shape, build.operations.choices, dtype
        self._recomputed = recomputed_blocks
        self._rotation = Rotation(shape, device, dtype)
        self.image_in, self.text_in = (build.linear(n, shape.hidden) for n in (shape.packed, shape.text_width))
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
        """Predict the velocity.

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
        image_NLC, text_NTC = self.image_in(x_NLP.to(dtype)), self.text_in(text_NTK.to(dtype))
        for number, block in enumerate(self.double_blocks):
            text_NTC, image_NLC = self._run(number, block, text_NTC, image_NLC, vector_NC, rotation)
        x_NSC = torch.cat([text_NTC, image_NLC], 1)
        for number, block in enumerate(self.single_blocks, len(self.double_blocks)):
            x_NSC = self._run(number, block, x_NSC, vector_NC, rotation)
        velocity_NLP: Tensor = self.output(x_NSC[:, shape.text_length :], vector_NC)
        return velocity_NLP

    def _run(self, number: int, block: nn.Module, *inputs: object) -> Tensor:
        if number < self._recomputed and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        result: Tensor = block(*inputs)
        return result

    @torch.no_grad()
    def _draw(self, generator_of: Callable[[str], torch.Generator], zero_std: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("_norm"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                generator = generator_of(name)
                drawn = torch.empty(parameter.shape, device=generator.device)
                if ".modulation." in name or name.startswith("output."):
                    std = zero_std
                else:
                    std = EMBEDDING_STD if name.startswith(("time_in.", "caption_in.")) else None
                if std is None:
                    nn.init.xavier_uniform_(drawn, generator=generator)
                else:
                    drawn.normal_(0.0, std, generator=generator)
                parameter.copy_(drawn)


def time_features(t_N: Tensor, features: int, period: float, scale: float) -> Tensor:
    """Return cosines, then sines, of ``scale t period^(-2j / features)``: (N, features), dtype of ``t_N``."""
    half = features // 2
    powers = torch.arange(half, dtype=torch.float64, device=t_N.device) / half
    angles_NJ = scale * t_N.unsqueeze(1) * torch.exp(-math.log(period) * powers).to(t_N.dtype)
    return torch.cat([angles_NJ.cos(), angles_NJ.sin()], 1)
