"""A decoder under autograd in a wide dtype whose products take the FP8 operands of another's pass.

Each operand that is taken must be a rounding of what comes here, with the scale that it was to have. Rounding again
instead would let the passes part: a number beside a tie falls to either side, and moves all behind it beside theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed.tensor_parallel.ranks import RowProduct
from common.language.blocks import MlpHalf
from common.language.decoder import HandwrittenDecoder
from common.language.network import Decoder, DecoderBlock
from common.ops.fp8_cast.reference import E4M3, E5M2, Activated, Fp8Tensor
from common.ops.swiglu import SwiGlu


@dataclasses.dataclass
class Pass:
    """The FP8 tensors of the last forward and backward pass.

    Attributes:
        inputs, gradients: of products, by the layers' names; the lowest product's gradient is nobody's operand.
        saved: SwiGLU's inputs, in the order of the layers.
    """

    inputs: dict[str, Fp8Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Fp8Tensor] = dataclasses.field(default_factory=dict)
    saved: list[Fp8Tensor] = dataclasses.field(default_factory=list)


PRODUCTS = ("qkv", "output", "gate_up", "down")


def noted(network: HandwrittenDecoder) -> Pass:
    """What the decoder's next pass will have multiplied."""
    halves = [layer.mlp for layer in network.layers[0] if isinstance(layer.mlp, MlpHalf)]
    found, swiglu = Pass(), halves[0].activation

    def forward(*args: Any, **kwargs: Any) -> Activated:
        activated: Activated = swiglu.forward(*args, **kwargs)
        assert isinstance(activated.saved, Fp8Tensor)
        found.saved.append(activated.saved)
        return activated

    for layer, mlp in zip(network.layers[0], halves, strict=True):
        for kind, product in zip(PRODUCTS, layer.products, strict=True):
            _note(product, f"layers.{layer.block.index}.{kind}", found)
        layer.mlp = dataclasses.replace(mlp, activation=SwiGlu(forward, swiglu.backward))
    return found


def _note(product: Any, name: str, found: Pass) -> None:
    forward_rows, towards_input = product.forward_rows, product.towards_input

    def noting(product: RowProduct, operands: dict[str, Fp8Tensor]) -> RowProduct:
        def run(x: Tensor, scale_inverse: Tensor | None, y: Tensor) -> None:
            assert scale_inverse is not None
            operands[name] = Fp8Tensor(x, None, scale_inverse, x)
            product(x, scale_inverse, y)

        return run

    product.forward_rows = noting(forward_rows, found.inputs)
    product.towards_input = lambda: noting(towards_input(), found.gradients)


@dataclasses.dataclass
class Operand:
    """What takes the place of a tensor.

    Attributes:
        used: the FP8 tensor.
        scale: that it was to have.
        dtype: likewise.
        slack: how far from its rounding a number may be, in root mean squares of the tensor.
    """

    used: Fp8Tensor
    scale: Tensor
    dtype: torch.dtype
    slack: float

    def of(self, x: Tensor) -> Tensor:
        """The operand in place of ``x``."""
        limits, scale = torch.finfo(self.dtype), self.scale.to(x.dtype)
        assert self.used.data.dtype == self.dtype
        data, scaled = self.used.data.to(x.dtype), x * scale
        within = scaled.clamp(limits.min, limits.max)
        spacing = limits.eps * within.abs().clamp(min=limits.smallest_normal).log2().floor().exp2()
        off = float(((data - within).abs() - spacing / 2).max())
        assert off <= self.slack * float(scaled.square().mean().sqrt()), f"{off} from its rounding"
        return data / scale


class _Taken(torch.autograd.Function):
    """An operand in place of x, and another in place of the result's gradient; None leaves either as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operand: Operand | None, gradient: Operand | None) -> Tensor:
        ctx.gradient = gradient
        return x.clone() if operand is None else operand.of(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (dy,) = gradients
        return dy if ctx.gradient is None else ctx.gradient.of(dy), None, None


class WithOperands(nn.Module):
    """A layer whose product takes operands, and whose adapter does not."""

    def __init__(self, layer: Any, operand: Operand, gradient: Operand | None) -> None:
        super().__init__()
        self.layer, self.operand, self.gradient = layer, operand, gradient

    def forward(self, x: Tensor, dropout: Any = None, rows: Tensor | None = None) -> Tensor:
        layer = self.layer
        y = _Taken.apply(F.linear(_Taken.apply(x, self.operand, None), layer.weight), None, self.gradient)
        if layer.adapter is None:
            return y
        dropped = x if dropout is None else dropout(x, rows, x.shape[1], 0)
        return y + layer.adapter.scale * F.linear(F.linear(dropped, layer.lora_a), layer.lora_b)


def take(decoder: Decoder, found: Pass, scales: Mapping[str, Tensor], slack: float) -> None:
    """Let ``decoder`` take the operands of ``found`` from now on.

    Args:
        decoder: in a wide dtype, on one rank, with the weights before they were cast.
        found: a pass over the same tokens.
        scales: buffers before that pass.
        slack: see :class:`Operand`.
    """
    for block in decoder.blocks():
        for kind in PRODUCTS:
            name, layer = f"layers.{block.index}.{kind}", getattr(block, kind)
            of_input, of_gradient = scales[f"{name}.fp8.scales"]
            weight = layer.weight.data
            largest = weight.abs().amax().float()
            layer.weight.data = (weight.float() * (448 / largest)).to(E4M3).to(weight.dtype) * (largest / 448)
            given = found.gradients.get(name)
            gradient = None if given is None else Operand(given, of_gradient, E5M2, slack)
            setattr(block, kind, WithOperands(layer, Operand(found.inputs[name], of_input, E4M3, slack), gradient))
        scale = scales[f"layers.{block.index}.saved.scales"][0]
        setattr(block, "feed_forward", _mlp(block, Operand(found.saved[block.index], scale, E4M3, slack)))  # noqa: B010


def _mlp(block: DecoderBlock, saved: Operand) -> Any:
    """The MLP; its activation is differentiated at what was kept."""

    def activation(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def mlp(x: Tensor) -> Tensor:
        gate_up = block.first(x)
        near = activation(_Taken.apply(gate_up, saved, None))
        return block.down(near + (activation(gate_up) - near).detach())

    return mlp
