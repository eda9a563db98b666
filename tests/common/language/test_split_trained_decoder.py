"""A trained decoder that two and four gloo ranks share, under autograd and as halves, equals the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.context_parallel.split import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.cross_entropy import next_token_loss
from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, partial_parameters
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.architecture import LlamaArchitecture
from common.language.decoder import HandwrittenDecoder, product_of
from common.language.network import Decoder
from common.language.operations import choose_operations
from common.language.products import Shared
from common.language.scales import WeightCasts
from common.language.tokens import TokenPlaces
from common.nn.scratch import Scratch
from common.ops.fp8_cast.reference import Fp8Tensor, widen_fp8
from common.ops.linear.fp8 import GRADIENT, INPUT
from tests.common.language.small_trained_decoder import CPU, REFERENCES, error
from tests.generators import generator_of
from tests.gloo_ranks import on_ranks

ARCHITECTURE = LlamaArchitecture(
    vocabulary=96, hidden=64, layers=2, heads=8, kv_heads=4, head_size=16, feed_forward=128,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.15,
)  # fmt: skip
B, S, CHUNK = 2, 32, 24
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"tp2": {"tp": 2}},
    4: {"tp4": {"tp": 4}, "tp2xcp2": {"cp": 2, "tp": 2}},
}
BLOCKS = ("autograd", "written", "recomputed")
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
        tokens_BL, labels_BL = (self.split.deal(given) for given in micro_batch())
        places = TokenPlaces.of(B, S, self.split.positions())
        hidden_sE = (self._trained or self.decoder).hidden_states(tokens_BL, places)
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


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, axes in LAYOUTS[world].items():
        layout = Layout(axes, rank)
        for blocks in BLOCKS:
            results[f"{name}/{blocks}"] = two_micro_batches(layout, blocks)
        if name == "tp2":
            parallel = TensorParallel.from_layout(layout)
            network = Network(parallel, ContextSplit(S), "written", torch.bfloat16, "fp8")
            results["fp8"] = fp8_steps(network) | {"gradients": whole_gradients(network, layout)}
            results["products"] = {
                f"{kind}/{linear}": one_product(kind, parallel, linear) for kind in KINDS for linear in ("torch", "fp8")
            }
            results["zeros"] = {kind: one_product(kind, parallel, "fp8", zeros=True) for kind in KINDS}
    return results


TOLERANCE = 1e-10
WORLD_OF = {name: world for world, layouts in LAYOUTS.items() for name in layouts}

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return the results of every rank, by the number of ranks."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return {world: on_ranks(run_rank, world, folder / str(world)) for world in LAYOUTS}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of one rank under autograd, after two equal micro-batches."""
    network = Network(TensorParallel(), ContextSplit(S), "autograd", torch.float64)
    losses_BS = network.backward()
    network.backward()
    return {"losses": losses_BS, "evaluation": losses_BS, "gradients": network.own_gradients()}


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("name", WORLD_OF)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_losses_and_gradients_are_those_of_one_rank(ranks, expected, name, blocks):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"{name}/{blocks}"]
        for what in ("losses", "evaluation"):
            assert_equal(found[what], expected[what][:, found["columns"]])
        assert found["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            assert_equal(found["gradients"][parameter], gradient)


@pytest.fixture(scope="module")
def in_fp8() -> dict[str, Any]:
    """One rank's steps with products in FP8."""
    network = Network(TensorParallel(), ContextSplit(S), "written", torch.bfloat16, "fp8")
    return fp8_steps(network) | {"gradients": network.own_gradients()}


def test_fp8_of_two_ranks_is_as_good_as_that_of_one(ranks, expected, in_fp8):
    """Against float64; by their norms, since numbers of three significant bits are all off."""
    for rank in ranks[2]:
        for found, wanted in zip(rank["fp8"]["losses"], in_fp8["losses"], strict=True):
            assert float(found.mean()) == pytest.approx(float(wanted.mean()), rel=0.02)
        for name, gradient in expected["gradients"].items():
            bound = 1.3 * error(in_fp8["gradients"][name], gradient / 2)
            assert error(rank["fp8"]["gradients"][name], gradient / 2) < bound, name


def test_an_evaluation_of_two_ranks_in_fp8_is_what_their_next_step_computes(ranks, in_fp8):
    for rank in ranks[2]:
        found = rank["fp8"]
        assert torch.equal(found["evaluation"], found["next"])
        assert float(found["evaluation"].mean()) == pytest.approx(float(in_fp8["evaluation"].mean()), rel=0.02)


def test_ranks_cast_their_own_tokens_with_their_own_scales(ranks):
    own = {"qkv": INPUT, "gate_up": INPUT, "output": GRADIENT, "down": GRADIENT}
    first, second = (rank["fp8"]["scales"] for rank in ranks[2])
    roles = {name: own.get(name.split(".")[2]) for name in first}
    assert sum(role is not None for role in roles.values()) == len(own) * ARCHITECTURE.layers
    for name, role in roles.items():
        if role is not None:
            assert first[name][role] > 0
            assert first[name][role] != second[name][role]


@pytest.mark.parametrize("linear", ["torch", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_two_ranks_are_those_of_their_operands(ranks, kind, linear):
    """In float64. Scales of FP8 differ by powers of two, so that bringing rows to one scale rounds nothing."""
    first, second = (rank["products"][f"{kind}/{linear}"] for rank in ranks[2])
    bound = 2**-7 if linear == "fp8" else 1e-12

    def joined(name: str, dim: int) -> Tensor:
        return torch.cat([first[name].double(), second[name].double()], dim)

    if linear == "fp8":
        assert first["inverse"] == 2 * second["inverse"]
    split = 0 if kind == "column" else 1  # of the weight
    x, dy, weight = joined("x", split), joined("dy", 1 - split), joined("weight", split)
    bias = joined("bias", 0) if kind == "column" else 0.0
    assert error(joined("y", 1 - split), x @ weight.t() + bias) < bound
    assert error(joined("dx", split), dy @ weight) < bound
    assert error(joined("dw", split), 2 * dy.t() @ x) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_zeros_alone_leaves_the_others_their_scales(ranks, kind):
    """Zeros have no scale: that of 1 with which they are cast would leave nothing of gradients of 1e-6."""
    first, second = (rank["zeros"][kind] for rank in ranks[2])
    own, all_of = ("x", "dy") if kind == "column" else ("dy", "x")
    half = TOKENS // 2
    assert not second[own].any()
    for part, rank in enumerate((first, second)):
        rows = rank[all_of].double()[:half] if kind == "column" else first[own]
        wanted = rows.t() @ first[own] if kind == "column" else rows.t() @ rank[all_of].double()[:half]
        assert error(rank["dw"], 2 * wanted) < 2**-7, f"rank {part}"


def test_a_row_parallel_product_takes_no_bias():
    parallel = TensorParallel(2, 0, object())  # type: ignore[arg-type]
    layer = RowParallelLinear(INPUTS, OUTPUTS, parallel, bias=True)
    assert product_of(layer, "torch", Shared(Scratch(CPU), WeightCasts(), parallel)).bias is None


def test_layers_that_do_not_say_how_they_are_shared_are_refused():
    parallel = TensorParallel(2, 0, object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Linear"):
        product_of(torch.nn.Linear(2, 2), "torch", Shared(Scratch(CPU), WeightCasts(), parallel))
