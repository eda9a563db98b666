"""Test the frozen decoder with fast operations on a GPU: against autograd in float64, and captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.distributed.tensor_parallel.vocabulary import next_token_loss
from common.language.architecture import LlamaArchitecture, TokenPositions, choose_operations
from common.language.decoder import FROZEN_PRODUCTS, HandwrittenDecoder
from common.language.fp8_products import load_frozen
from common.language.lora import LoraSettings
from common.language.network import Decoder
from common.ops.libraries import TRANSFORMER_ENGINE
from tests.common.language.fp8_operands import noted, take
from tests.generators import generator_of
from tests.gpu.support import GPU, captured, relative_error

pytestmark = pytest.mark.gpu

ARCHITECTURE = LlamaArchitecture(
    vocabulary=512, hidden=512, layers=3, heads=4, kv_heads=2, head_size=128, feed_forward=1024,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.04,
)  # fmt: skip
LORA = LoraSettings(rank=16, alpha=32.0, dropout=0.1)
ROWS, LENGTH = 2, 384
BOUNDS = {"torch": (0.002, 0.06), "fp8": (0.02, 0.35), "te": (0.02, 0.35)}
"""Largest relative errors of the loss and of a gradient. With the two mantissa bits of e5m2, they show wrong wiring."""

SLACK, ROUNDED = 0.2, 0.05
"""Largest error of FP8 operands, in root mean squares of their rounding, and relative error of gradients from them."""

FAST = {"rms_norm": "triton", "rope": "triton", "swiglu": "triton", "lora_input": "triton"}
TE_MISSING = TRANSFORMER_ENGINE.unavailable()
LINEAR = pytest.mark.parametrize(
    "linear",
    [
        "torch",
        "fp8",
        pytest.param("te", marks=pytest.mark.skipif(TE_MISSING is not None, reason=str(TE_MISSING))),
    ],
)


def filled(decoder: Decoder) -> Decoder:
    """Replace the initial zeros of B, which would hide mistakes."""
    decoder.initialise_adapters(lambda name: generator_of(name, GPU))
    for name, parameter in decoder.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(0.0, 0.02, generator=generator_of(name, GPU))
    return decoder


def frozen_decoder(linear: str, recomputed_qkv: int = 0, attention: str = "cudnn") -> HandwrittenDecoder:
    decoder = Decoder(ARCHITECTURE, "meta", torch.bfloat16, LORA)
    drawn = decoder.drawn_base(lambda name: generator_of(name, GPU), GPU, torch.bfloat16)
    load_frozen(
        decoder, drawn, GPU, torch.bfloat16, FROZEN_PRODUCTS[linear].state_type if linear in FROZEN_PRODUCTS else None
    )
    operations, _ = choose_operations(
        {**FAST, "attention": attention}, ARCHITECTURE, ContextSplit(LENGTH), GPU, torch.bfloat16, adapters=True
    )
    return HandwrittenDecoder(filled(decoder), operations, linear, 0, recomputed_qkv=recomputed_qkv)


def oracle(like: Decoder) -> Decoder:
    """Return the same weights in float64."""
    decoder = Decoder(ARCHITECTURE, "cpu", torch.float64, LORA)
    source = Decoder(ARCHITECTURE, "meta", torch.bfloat16, LORA)
    values = dict(source.drawn_base(lambda name: generator_of(name, GPU), GPU, torch.bfloat16))
    values |= {name: p for name, p in like.named_parameters() if p.requires_grad}
    decoder.load_state_dict({name: value.double().cpu() for name, value in values.items()})
    return decoder.to(GPU)


def rows() -> Tensor:
    generator = torch.Generator(GPU).manual_seed(1)
    return torch.randint(ARCHITECTURE.vocabulary, (ROWS, LENGTH + 1), generator=generator, device=GPU)


def loss(network: Decoder | HandwrittenDecoder, decoder: Decoder, given: Tensor, seed: Tensor) -> Tensor:
    positions = TokenPositions.whole(ROWS, LENGTH, seed, GPU)
    hidden = network.hidden_states(given[:, :-1], positions)
    return next_token_loss(hidden, decoder.head.weight, given[:, 1:].flatten(), decoder.parallel, 1024).mean()


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.requires_grad and p.grad is not None}


@LINEAR
@pytest.mark.parametrize("recomputed_qkv", [0, 3])
def test_fast_operations_follow_float64(linear: str, recomputed_qkv: int) -> None:
    frozen, seed = frozen_decoder(linear, recomputed_qkv), torch.tensor(7, device=GPU)
    exact = oracle(frozen.decoder)
    for _ in range(2):  # the second use has the scale of the first
        frozen.decoder.zero_grad()
        found = loss(frozen, frozen.decoder, rows(), seed)
        found.backward()
    expected = loss(exact, exact, rows(), seed)
    expected.backward()
    of_loss, of_gradient = BOUNDS[linear]
    torch.testing.assert_close(found.double(), expected, rtol=of_loss, atol=0)
    ours, theirs = gradients(frozen.decoder), gradients(exact)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert relative_error(ours[name], gradient) < of_gradient, name


def test_fp8_products_take_rounded_operands_and_all_else_follows_float64() -> None:
    frozen, seed = frozen_decoder("fp8"), torch.tensor(7, device=GPU)
    exact = oracle(frozen.decoder)
    loss(frozen, frozen.decoder, rows(), seed).backward()  # the scale of a first use comes from a sample
    frozen.decoder.zero_grad()
    scales = {name: buffer.clone() for name, buffer in frozen.decoder.named_buffers()}
    operands = noted(frozen)
    loss(frozen, frozen.decoder, rows(), seed).backward()
    found, trained = gradients(frozen.decoder), {name: p for name, p in exact.named_parameters() if p.requires_grad}
    take(exact, operands, scales, SLACK)
    loss(exact, exact, rows(), seed).backward()
    assert found.keys() == trained.keys()
    for name, parameter in trained.items():
        assert parameter.grad is not None
        assert relative_error(found[name], parameter.grad) < ROUNDED, name


@LINEAR
def test_a_captured_pass_takes_new_rows_and_seeds(linear: str) -> None:
    frozen, seed, given = frozen_decoder(linear), torch.tensor(7, device=GPU), rows()
    decoder = frozen.decoder

    def run() -> Tensor:
        decoder.zero_grad()
        value = loss(frozen, decoder, given, seed)
        value.backward()
        return value

    graph, value = captured(run)
    replayed = {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}
    found = {}
    for number in (7, 8):
        seed.fill_(number)
        scales = {name: buffer.clone() for name, buffer in decoder.named_buffers()}
        graph.replay()
        found[number] = (value.item(), replayed["layers.0.qkv.lora_a"].clone())
    assert not torch.equal(found[7][1], found[8][1])
    for name, buffer in decoder.named_buffers():  # a scale follows from the use before
        buffer.copy_(scales[name])
    eager = run()
    assert eager.item() == pytest.approx(found[8][0], rel=1e-3)
    torch.testing.assert_close(decoder.blocks()[0].qkv.lora_a.grad, found[8][1], rtol=0.05, atol=1e-5)
