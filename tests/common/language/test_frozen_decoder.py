"""Halves with backward passes written out against the decoder under autograd, and what they keep."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.distributed.tensor_parallel.vocabulary import next_token_loss
from common.errors import CheckpointError, ConfigError, UnsupportedImplementation
from common.language.architecture import Gradients, LlamaArchitecture, TokenPositions, choose_operations
from common.language.blocks import AttentionHalf, MlpHalf
from common.language.decoder import FROZEN_PRODUCTS, HandwrittenDecoder
from common.language.fp8_products import (
    ROWS_AT_ONCE,
    Fp8FrozenProduct,
    FrozenWeight,
    cast_weight,
    check_fp8,
    load_frozen,
)
from common.language.lora import LoraSettings
from common.language.memory import FrozenWorkspace
from common.language.network import Decoder
from common.language.products import Product
from common.language.residual import NormPasses, Pair
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, cast_reference
from common.ops.row_norm import Normed
from common.optim.memory_plan import KEPT, TRANSPOSED, plan
from tests.common.language.fp8_operands import noted, take
from tests.generators import generator_of

ARCHITECTURE = LlamaArchitecture(
    vocabulary=96, hidden=64, layers=3, heads=4, kv_heads=2, head_size=24, feed_forward=96,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.15,
)  # fmt: skip
LORA = LoraSettings(rank=16, alpha=32.0, dropout=0.25)
ROWS, LENGTH = 2, 16
CPU = torch.device("cpu")


def built(
    dtype: torch.dtype, fp8: bool = False, recomputed_qkv: int = 0, transposed_layers: int = 0
) -> HandwrittenDecoder:
    decoder = Decoder(ARCHITECTURE, "meta", dtype, LORA)
    load_frozen(decoder, decoder.drawn_base(generator_of, CPU, dtype), CPU, dtype, FrozenWeight if fp8 else None)
    decoder.initialise_adapters(generator_of)
    trained_b(decoder)
    operations, _ = choose_operations({}, ARCHITECTURE, ContextSplit(LENGTH), CPU, dtype, adapters=True)
    return HandwrittenDecoder(
        decoder, operations, "fp8" if fp8 else "torch", 0, recomputed_qkv=recomputed_qkv,
        transposed_layers=transposed_layers,
    )  # fmt: skip


def trained_b(decoder: Decoder) -> None:
    """Zeros would hide mistakes."""
    for name, parameter in decoder.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(0.0, 0.1, generator=generator_of(name))


def reference(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(ARCHITECTURE, dtype=dtype, lora=LORA)
    decoder.initialise(generator_of)
    trained_b(decoder)
    return decoder


def tokens() -> Tensor:
    return torch.randint(ARCHITECTURE.vocabulary, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(2))


def losses(network: Decoder | HandwrittenDecoder, decoder: Decoder, seed: int | None = 5) -> Tensor:
    given = tokens()
    positions = TokenPositions.whole(ROWS, LENGTH, None if seed is None else torch.tensor(seed))
    hidden = network.hidden_states(given[:, :-1], positions)
    return next_token_loss(hidden, decoder.head.weight, given[:, 1:].flatten(), decoder.parallel, chunk=24)


def gradients(network: Decoder | HandwrittenDecoder, decoder: Decoder) -> dict[str, Tensor]:
    decoder.zero_grad()
    losses(network, decoder).mean().backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recomputed_qkv", [0, 2])
def test_halves_are_the_decoder_under_autograd(recomputed_qkv):
    plain, frozen = reference(torch.float64), built(torch.float64, recomputed_qkv=recomputed_qkv)
    torch.testing.assert_close(losses(frozen, frozen.decoder), losses(plain, plain), rtol=1e-12, atol=1e-12)
    found, expected = gradients(frozen, frozen.decoder), gradients(plain, plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_kept_transposes_are_those_made_when_needed():
    keeping, making = built(torch.bfloat16, True, transposed_layers=2), built(torch.bfloat16, True)
    for network in (keeping, making):
        losses(network, network.decoder).mean().backward()
    for name, parameter in making.decoder.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(keeping.decoder.get_parameter(name).grad, parameter.grad), name
    first, last = (keeping.layers[0][index].mlp.first for index in (0, -1))
    assert torch.equal(first._transposed_IO.float(), first.weight.float().t())
    assert last._transposed_IO is None


def test_evaluation_drops_nothing_and_keeps_nothing():
    plain, frozen = reference(torch.float64), built(torch.float64)
    with torch.no_grad():
        found = losses(frozen, frozen.decoder, None)
    assert not found.requires_grad
    torch.testing.assert_close(found, losses(plain, plain, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "slack", "bound"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 0.1, 0.02)], ids=["fp32", "bf16"]
)
def test_fp8_products_take_rounded_operands_and_all_else_is_wide(dtype, slack, bound):
    frozen = built(dtype, fp8=True)
    gradients(frozen, frozen.decoder)  # the scale of a first use comes from a sample
    scales = {name: buffer.clone() for name, buffer in frozen.decoder.named_buffers()}
    operands = noted(frozen)
    found = gradients(frozen, frozen.decoder)
    plain = reference(dtype).double()  # in float64 other weights would be drawn
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    take(plain, operands, scales, slack)
    losses(plain, plain).mean().backward()
    assert found.keys() == trained.keys()
    for name, parameter in trained.items():
        error = float((found[name] - parameter.grad).norm() / parameter.grad.norm())
        assert error < bound, f"{name}: {error}"


class CastsItself(Fp8FrozenProduct):
    """Leaves no cast to the operations around it."""

    def input_scaling(self) -> None: ...

    def gradient_scaling(self) -> None: ...

    def cast_input(self, x_TI: Tensor, inference: bool) -> Fp8Tensor:
        return cast_reference(x_TI, super().input_scaling(), E4M3, False, inference)

    def cast_gradient(self, dy_TO: Tensor) -> Fp8Tensor:
        return cast_reference(dy_TO, super().gradient_scaling(), E5M2, False)


@pytest.mark.parametrize("product", [Fp8FrozenProduct, CastsItself])
def test_fp8_stays_near_wide_products(product, monkeypatch):
    monkeypatch.setitem(FROZEN_PRODUCTS, "fp8", product)
    plain, frozen = reference(torch.float32), built(torch.bfloat16, fp8=True)
    for _ in range(2):
        found = gradients(frozen, frozen.decoder)
    expected = gradients(plain, plain)
    with torch.no_grad():
        torch.testing.assert_close(
            losses(frozen, frozen.decoder).mean(), losses(plain, plain).mean(), rtol=0.02, atol=0
        )
    for name, gradient in expected.items():  # no more than sanity: e5m2 has two bits, and bf16 alone is 3 % off here
        error = (found[name].float() - gradient).norm() / gradient.norm()
        assert error < 0.45, f"{name}: {error}"


def test_fp8_values_are_the_same_where_they_are_computed_again():
    kept, again = built(torch.bfloat16, fp8=True), built(torch.bfloat16, fp8=True, recomputed_qkv=ARCHITECTURE.layers)
    for _ in range(2):
        found, expected = gradients(again, again.decoder), gradients(kept, kept.decoder)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_frozen_weight_takes_the_whole_range_of_e4m3():
    """The largest value is -448 / 4, in the last of two parts. The others have few bits, so none is rounded."""
    weight_OI = torch.randint(-8, 9, (ROWS_AT_ONCE + 1, 16), generator=generator_of("weight")).bfloat16()
    weight_OI[-1, 0] = -112.0
    data, inverse = cast_weight(weight_OI)
    assert inverse.item() == 0.25
    assert torch.equal(data.float(), 4 * weight_OI.float())


def test_a_frozen_weight_of_zeros_is_cast_to_zeros():
    data, inverse = cast_weight(torch.zeros(16, 16))
    assert inverse.item() == 1.0
    assert not data.float().any()


def test_resting_scales_rest():
    frozen = built(torch.bfloat16, fp8=True)
    gradients(frozen, frozen.decoder)
    before = {name: buffer.clone() for name, buffer in frozen.decoder.named_buffers()}
    assert any("scales" in name for name in before)
    assert all((buffer > 0).all() for name, buffer in before.items() if "scale" in name)
    with torch.no_grad():
        losses(frozen, frozen.decoder, None)
    assert all(torch.equal(buffer, before[name]) for name, buffer in frozen.decoder.named_buffers())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("recomputed_qkv", [0, 1])
def test_layers_keep_the_planned_bytes(fp8, recomputed_qkv):
    """All that the graph holds beyond the weights, by memory and not by tensor: nobody keeps a product's input."""
    frozen = built(torch.bfloat16, fp8, recomputed_qkv)
    workspace = FrozenWorkspace(
        architecture=ARCHITECTURE, tokens=ROWS * LENGTH, eval_tokens=0, rank=LORA.rank, itemsize=2, fp8=fp8,
        head_chunk=24, alone=True,
    )  # fmt: skip
    own = {
        p.untyped_storage().data_ptr() for p in itertools.chain(frozen.decoder.parameters(), frozen.decoder.buffers())
    }
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    positions = TokenPositions.whole(ROWS, LENGTH, torch.tensor(5))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        frozen.hidden_states(tokens()[:, :-1], positions)
    planned = ARCHITECTURE.layers * workspace.layer() - recomputed_qkv * workspace.qkv()
    last_norm = ROWS * LENGTH * (ARCHITECTURE.hidden * 2 + 4)
    lse = ARCHITECTURE.layers * ROWS * LENGTH * ARCHITECTURE.heads * 4  # kept beside what autograd saves
    assert sum(kept.values()) == pytest.approx(planned + last_norm - lse, rel=0.002, abs=64)


LLAMA_2_70B = LlamaArchitecture(32_000, 8192, 80, 64, 8, 128, 28_672, 1e-5, 10_000.0, 0.02)
WHOLE = FrozenWorkspace(
    architecture=LLAMA_2_70B, tokens=8192, eval_tokens=0, rank=16, itemsize=2, fp8=True, head_chunk=2048, alone=True
)
H100, H200 = 85_000_000_000, 150_754_000_000


def test_a_plan_recomputes_as_little_as_fits():
    """Kept bytes of a layer as they are counted in gigabytes by hand."""
    workspace = dataclasses.replace(WHOLE, eval_tokens=8192)
    assert workspace.frozen() == pytest.approx(68.45e9 + 1.05e9, rel=0.001)
    by_hand = 2 * 134.2e6 + 167.8e6 + 134.2e6 + 2.1e6 + 469.8e6
    assert workspace.layer() == pytest.approx(by_hand, rel=0.002)
    found = plan(workspace, H200, None, 0)
    assert found.total <= found.capacity < found.total + workspace.qkv()
    assert plan(workspace, H200, 80, 0).total < found.total
    apart = dataclasses.replace(workspace, cast_apart=True)  # gate and up's gradient in bf16 beside that in FP8
    assert apart.transient() == pytest.approx(5 * 134.2e6 + 939.5e6 + 469.8e6, rel=0.001)
    with pytest.raises(ConfigError, match=r"GB are missing; use model\.recomputed_qkv=auto"):
        plan(workspace, 80_000_000_000, None, 0)


def test_each_ranks_tokens_are_enough_for_a_product_in_fp8():
    check_fp8("fp8", LLAMA_2_70B, 4, (8192, 0), CPU, torch.bfloat16)
    check_fp8("fp8", LLAMA_2_70B, 1, (96,), CPU, torch.bfloat16)
    with pytest.raises(UnsupportedImplementation, match=r"model\.linear=fp8: a product of 24 tokens"):
        check_fp8("fp8", LLAMA_2_70B, 4, (8192, 96), CPU, torch.bfloat16)


def test_remaining_memory_holds_transposed_weights():
    """One GPU has none at 80 layers; two that share rows have some, two that share layers enough for all."""
    whole = dataclasses.replace(WHOLE, eval_tokens=8192)
    rows = dataclasses.replace(whole, tokens=4096, sharers=2, eval_tokens=4096, alone=False)
    layers = dataclasses.replace(whole, ranks=2, alone=False)
    plans = [plan(workspace, H200, None, None) for workspace in (whole, rows, layers)]
    assert (plans[0].transposed, plans[2].transposed) == (0, 80)
    found = plans[1]
    assert 0 < found.transposed < 80
    assert found.parts[TRANSPOSED] == found.transposed * 855_638_016
    assert found.total <= H200 < found.total + 855_638_016
    assert plan(rows, H200, None, 3).parts[TRANSPOSED] == 3 * 855_638_016
    in_half = dataclasses.replace(layers, fp8=False, tokens=2048, eval_tokens=0)
    assert plan(in_half, H200, None, None).transposed == 0


def test_the_plan_counts_buffers_for_exchanged_tokens():
    """The residual stream of all tokens, twice, in 16 bits."""
    layers = dataclasses.replace(WHOLE, ranks=2, eval_tokens=16_384, alone=False)
    rows = dataclasses.replace(layers, ranks=1)
    assert layers.reserved() - rows.reserved() == 2 * 16_384 * 8192 * 2


def test_the_plan_of_an_evaluation_rank_has_no_training_memory():
    """Weights, adapters in bf16, scratch of 2 * 28,672 columns and of a transposed weight, the forward pass, 5 GB."""
    training = dataclasses.replace(WHOLE, alone=False)
    evaluating = dataclasses.replace(training, tokens=0, eval_tokens=8192)
    with pytest.raises(ConfigError, match=r"use model\.recomputed_qkv=auto"):
        plan(training, H100, None, 0)
    found = plan(evaluating, H100, None, 0)
    hidden, qkv, mlp = 8192 * 8192 * 2, 8192 * 10_240 * 2, 8192 * 28_672
    forward = 4 * hidden + 2 * qkv + hidden + mlp + 2048 * 32_000 * 8
    by_hand = 69.5e9 + 44_564_480 * 2 + (4 * mlp + 2 * 28_672 * 8192) + forward + 5e9
    assert found.total == pytest.approx(by_hand, rel=0.001)
    assert (found.parts[KEPT], found.parts["transients"], found.recomputed) == (0, 0, 0)
    with pytest.raises(ConfigError, match=r"use model\.linear=fp8, a smaller reader\.eval_rows, .* evaluation\.layout"):
        plan(evaluating, 70_000_000_000, None, 0)


def test_a_base_that_does_not_fit_is_refused():
    decoder = Decoder(ARCHITECTURE, "meta", torch.float32, LORA)
    whole = dict(Decoder(ARCHITECTURE).state_dict())
    with pytest.raises(CheckpointError, match=r"norm\.weight and 0 other frozen weights are missing"):
        load_frozen(decoder, [pair for pair in whole.items() if pair[0] != "norm.weight"], CPU, torch.float32, None)
    decoder = Decoder(ARCHITECTURE, "meta", torch.float32, LORA)
    with pytest.raises(CheckpointError, match=r"norm\.weight is \(3,\), the network has \(64,\)"):
        load_frozen(decoder, [("norm.weight", torch.ones(3))], CPU, torch.float32, None)


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "FP8"])
def test_a_layer_releases_a_products_input_before_it_allocates_what_it_keeps(monkeypatch, fp8):
    """A temporary that outlives a kept tensor leaves a gap per layer in a CUDA graph's memory: 6 GB of Llama 2 70B."""
    results = []
    alive = []

    def counted() -> int:
        return sum(result() is not None for result in results)

    norm, multiply, heads = NormPasses.forward, Product.multiply, AttentionHalf.gathered_heads

    def noting(self: NormPasses, *args: Any) -> Normed:
        normed = norm(self, *args)
        results[:] = [weakref.ref(each) for each in (normed.y, normed.y8 and normed.y8.data) if each is not None]
        return normed

    def multiplying(self: Product, *args: Any) -> Tensor:
        alive.append(counted())
        return multiply(self, *args)

    def splitting(self: AttentionHalf, *args: Any) -> Gradients:
        assert counted() == 0, "the input of QKV is alive during the attention"
        return heads(self, *args)

    monkeypatch.setattr(NormPasses, "forward", noting)
    monkeypatch.setattr(Product, "multiply", multiplying)
    monkeypatch.setattr(AttentionHalf, "gathered_heads", splitting)
    frozen = built(torch.bfloat16, fp8=fp8)
    losses(frozen, frozen.decoder)
    # QKV and gate-up read the norm's result, in one format only; output and down run after it has been released.
    assert alive == [1, 0, 1, 0] * ARCHITECTURE.layers


def test_the_sum_that_enters_a_layer_is_released_before_its_mlp_runs(monkeypatch):
    entered = []
    alive = []
    attention, mlp = AttentionHalf.__call__, MlpHalf.__call__

    def entering(self: AttentionHalf, pair: Pair, *args: Any) -> Pair:
        if pair.delta is not None:
            entered[:] = [weakref.ref(pair.delta)]
        return attention(self, pair, *args)

    def running(self: MlpHalf, *args: Any) -> Pair:
        alive.extend(delta() is not None for delta in entered)
        return mlp(self, *args)

    monkeypatch.setattr(AttentionHalf, "__call__", entering)
    monkeypatch.setattr(MlpHalf, "__call__", running)
    frozen = built(torch.bfloat16)
    losses(frozen, frozen.decoder)
    assert alive == [False] * (ARCHITECTURE.layers - 1)
