"""A trained decoder and its products that ranks share; test_split_trained_decoder.py compares them with one rank's.

Shapes: B rows, S tokens of a row, L those of one rank of cp, T = B L, s tokens of one rank of tp, I and O features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, partial_parameters
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_parallel.vocabulary import next_token_loss
from common.language.architecture import LlamaArchitecture, TokenPositions, choose_operations
from common.language.decoder import HandwrittenDecoder, product_of
from common.language.network import Decoder
from common.language.products import Scratch, Shared, WeightCasts
from common.ops.fp8_cast.reference import Fp8Tensor, widen_fp8
from common.ops.linear.fp8 import GRADIENT, INPUT
from tests.common.language.small_trained_decoder import CPU, REFERENCES
from tests.generators import generator_of

ARCHITECTURE = LlamaArchitecture(
    vocabulary=96, hidden=64, layers=2, heads=8, kv_heads=4, head_size=16, feed_forward=128,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.15,
)  # fmt: skip
B, S, CHUNK = 2, 32, 24
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"tp2": {"tp": 2}},
    4: {"tp4": {"tp": 4}, "tp2xcp2": {"cp": 2, "tp": 2}},
}
BLOCKS = ("autograd", "handwritten", "recomputed")
FP8_STEPS = 2
"""The first of which finds its scales in a sample."""

TOKENS, INPUTS, OUTPUTS = 64, 32, 96
KINDS = ("column", "row")


def micro_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S)."""
    tokens_BR = torch.randint(ARCHITECTURE.vocabulary, (B, S + 1), generator=torch.Generator().manual_seed(2))
    return tokens_BR[:, :-1].contiguous(), tokens_BR[:, 1:].contiguous()


class Network:
    """A rank's part of the decoder with one way to run its blocks."""

    def __init__(
        self, parallel: TensorParallel, split: ContextSplit, blocks: str, dtype: torch.dtype, linear: str = "torch"
    ) -> None:
        self.parallel, self.split = parallel, split
        self.decoder = decoder = Decoder(ARCHITECTURE, dtype=dtype, parallel=parallel, split=split)
        splits = decoder.tensor_splits()
        for name, parameter in decoder.named_parameters():
            whole = torch.empty(splits[name].full_shape if name in splits else parameter.shape, dtype=torch.float64)
            whole.normal_(1.0 if whole.ndim == 1 else 0.0, 0.12, generator=generator_of(name))
            parameter.data.copy_(splits[name].local_of(whole) if name in splits else whole)
        self._trained: HandwrittenDecoder | None = None
        if blocks != "autograd":
            operations, _ = choose_operations(REFERENCES, ARCHITECTURE, split, CPU, dtype)
            recomputed = ARCHITECTURE.layers if blocks == "recomputed" else 0
            self._trained = HandwrittenDecoder(
                decoder, operations, linear, B * split.local_length, recomputed_mlp=recomputed
            )

    def losses(self) -> Tensor:
        """Losses (B, L) of this rank's columns."""
        tokens_BL, labels_BL = (self.split.own_tokens(given) for given in micro_batch())
        positions = TokenPositions.of(B, S, self.split.positions())
        hidden_sE = (self._trained or self.decoder).hidden_states(tokens_BL, positions)
        weight, labels_T = self.decoder.head.weight, labels_BL.flatten()
        return next_token_loss(hidden_sE, weight, labels_T, self.parallel, CHUNK).view(B, -1)

    def backward(self) -> Tensor:
        """Add this rank's gradients of the mean loss; losses (B, L)."""
        losses_BL = self.losses()
        (losses_BL.sum() / (B * S)).backward()
        return losses_BL.detach()

    def own_gradients(self) -> dict[str, Tensor]:
        """As the backward passes have left them."""
        return {name: p.grad.clone() for name, p in self.decoder.named_parameters() if p.grad is not None}


def whole_gradients(network: Network, layout: Layout) -> dict[str, Tensor]:
    """Gradients of whole weights, summed over all ranks that have parts of sums."""
    partial, splits = partial_parameters(network.decoder), network.decoder.tensor_splits()
    found = {}
    for name, gradient in network.own_gradients().items():
        gradient = gradient.double()
        for axis in ("cp", *partial.get(name, ())):
            if layout.size(axis) > 1:
                dist.all_reduce(gradient, group=layout.group(axis))
        found[name] = splits[name].gather(gradient, layout.group("tp"), CPU) if name in splits else gradient
    return found


def two_micro_batches(layout: Layout, blocks: str) -> dict[str, Any]:
    """Whole gradients, which add up, and the losses of this rank's columns, with these columns."""
    split = ContextSplit.from_layout(layout, S)
    network = Network(TensorParallel.from_layout(layout), split, blocks, torch.float64)
    losses_BL = network.backward()
    network.backward()
    with torch.no_grad():
        evaluation_BL = network.losses()
    gradients = whole_gradients(network, layout)
    return {"columns": split.positions(), "losses": losses_BL, "evaluation": evaluation_BL, "gradients": gradients}


def fp8_steps(network: Network) -> dict[str, Any]:
    """Losses (B, L) of steps, of an evaluation, and of a step behind it; gradients and scales of steps before it."""
    losses = []
    for _ in range(FP8_STEPS):
        network.decoder.zero_grad()
        losses.append(network.backward())
    scales = {name: value.clone() for name, value in network.decoder.named_buffers() if name.endswith("scales")}
    assert network._trained is not None
    with torch.no_grad(), network._trained.evaluating():
        evaluation = network.losses()
    return {"losses": losses, "scales": scales, "evaluation": evaluation, "next": network.losses().detach()}


def _given(kind: str, parallel: TensorParallel, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """This rank's layer, input and gradient. Tokens of ranks differ in size, by powers of two."""
    layer: ColumnParallelLinear | RowParallelLinear
    given = {"dtype": dtype, "bias": True}
    if kind == "column":
        layer = ColumnParallelLinear(INPUTS, (OUTPUTS,), parallel, **given)
    else:
        layer = RowParallelLinear(INPUTS, OUTPUTS, parallel, **given)
    for name, parameter in layer.named_parameters():
        split = layer.splits.get(name)
        whole = torch.empty(parameter.shape if split is None else split.full_shape, dtype=torch.float64)
        whole.normal_(0.0, 0.1, generator=generator_of(name))
        parameter.data.copy_(whole if split is None else split.local_of(whole))
    own = TOKENS // parallel.size
    sizes = torch.repeat_interleave(2.0 ** -torch.arange(parallel.size), own).double().unsqueeze(1)
    x_TI, dy_TO = (
        torch.randn(TOKENS, n, generator=generator_of(str(n)), dtype=torch.float64) for n in (INPUTS, OUTPUTS)
    )
    if kind == "column":
        return layer, parallel.own_tokens(x_TI * sizes).to(dtype), _own_columns(dy_TO, parallel).to(dtype)
    return layer, _own_columns(x_TI, parallel).to(dtype), parallel.own_tokens(dy_TO * sizes).to(dtype)


def _own_columns(x_TK: Tensor, parallel: TensorParallel) -> Tensor:
    return x_TK.chunk(parallel.size, 1)[parallel.index].contiguous()


def one_product(kind: str, parallel: TensorParallel, linear: str, zeros: bool = False) -> dict[str, Tensor]:
    """Result, input gradient, and weight gradient of two backward passes; and the operands, widened, as of one rank.

    Args:
        kind, parallel, linear: of the product.
        zeros: the last rank's own tokens, or their gradients, are, and those of all are small; no scale is known.
    """
    dtype = torch.bfloat16 if linear == "fp8" else torch.float64
    layer, x, dy = _given(kind, parallel, dtype)
    product = product_of(layer, linear, Shared(Scratch(CPU), WeightCasts(), parallel))
    if zeros:
        own = x if kind == "column" else dy
        own.mul_(1e-6 if parallel.index + 1 < parallel.size else 0.0)
    elif linear == "fp8":  # scales of ranks differ by powers of two
        scales = layer.get_submodule("fp8").get_buffer("scales")
        scales[INPUT] = 64.0 * (2.0**parallel.index if kind == "column" else 1.0)
        scales[GRADIENT] = 64.0 * (2.0**parallel.index if kind == "row" else 1.0)
    operand, gradient = product.cast_input(x, False), product.cast_gradient(dy)
    y = product.multiply(operand)
    dx, _ = (product.movement.backward(product, gradient, operand) for _ in range(2))
    assert layer.weight.grad is not None
    found = {"y": y.detach(), "dx": dx, "dw": layer.weight.grad, "weight": layer.weight.detach()}
    for name, rows in (("x", operand), ("dy", gradient)):
        found[name] = widen_fp8(rows).double() if isinstance(rows, Fp8Tensor) else rows
    if linear == "fp8":
        found["weight"] = product._weight8.double() * product._weight_inverse.double()
        found["inverse"] = operand.scale_inverse if kind == "column" else gradient.scale_inverse
    return found | ({"bias": layer.bias.detach()} if kind == "column" else {})


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, axes in LAYOUTS[world].items():
        layout = Layout(axes, rank)
        for blocks in BLOCKS:
            results[f"{name}/{blocks}"] = two_micro_batches(layout, blocks)
        if name == "tp2":
            parallel = TensorParallel.from_layout(layout)
            network = Network(parallel, ContextSplit(S), "handwritten", torch.bfloat16, "fp8")
            results["fp8"] = fp8_steps(network) | {"gradients": whole_gradients(network, layout)}
            results["products"] = {
                f"{kind}/{linear}": one_product(kind, parallel, linear) for kind in KINDS for linear in ("torch", "fp8")
            }
            results["zeros"] = {kind: one_product(kind, parallel, "fp8", zeros=True) for kind in KINDS}
    return results
