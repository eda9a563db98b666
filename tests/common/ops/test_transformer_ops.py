"""Test the hash of random bits, dropout, and the references of transformer operations against formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.ops.attention.reference import attention_reference
from common.ops.bias_gelu import bias_gelu_reference
from common.ops.cross_entropy import NO_LABEL, OF_A_PART, masked_cross_entropy_reference
from common.ops.dropout.reference import DropoutMask, dropout_reference, keep_mask, keep_rows, threshold
from common.ops.dropout_add_norm import dropout_add_norm_reference
from common.ops.linear import Linear
from common.ops.random_bits.reference import normal_pairs, words
from tests.drawn_tensors import wide

# Random bits


SEEDS = [0, 1, -1, 1 << 40, -0x0123456789ABCDEF]


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def formula(index: np.ndarray, seed: int, site: int) -> np.ndarray:
    low, high = (np.array([part], np.uint32) for part in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    number = np.array([(site * 0x9E3779B9 + 1) & 0xFFFFFFFF], np.uint32)
    first = mix(low ^ mix(number))
    second = mix(high + mix(first ^ np.uint32(site)))
    return mix(mix(index ^ first) ^ second)


@pytest.mark.parametrize("site", [0, 1, 77])
@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_the_formula(seed, site):
    index = np.array([0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    found = words(torch.from_numpy(index.astype(np.int64)), torch.tensor(seed), site)
    assert found.dtype == torch.int32
    assert np.array_equal(found.numpy().view(np.uint32), formula(index, seed, site))


def test_seeds_and_indices_broadcast():
    seeds, index = torch.tensor(SEEDS), torch.arange(100)
    together = words(index, seeds[:, None])
    assert torch.equal(together, torch.stack([words(index, seed) for seed in seeds]))


def test_sites_broadcast():
    sites, index = torch.tensor([0, 1, 77, 2**31 - 1]), torch.arange(100)
    together = words(index, torch.tensor(SEEDS[4]), sites[:, None])
    assert torch.equal(together, torch.stack([words(index, torch.tensor(SEEDS[4]), int(site)) for site in sites]))


def test_every_bit_is_set_half_of_the_time_and_in_another_half_for_another_seed():
    index, bits = torch.arange(1 << 16), torch.arange(32)
    some, others = ((words(index, torch.tensor(seed))[:, None] >> bits) & 1 for seed in (3, 4))
    for ones in (some, some ^ others, some[1:] ^ some[:-1]):
        assert (ones.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(1 << 16)


@pytest.mark.parametrize("site", [0, 77])
def test_normal_pairs_are_box_and_mullers_of_two_words(site):
    index = torch.tensor([0, 1, 12345, 2**31 - 1])
    found = normal_pairs(index, torch.tensor(SEEDS[4]), site, torch.float64)
    first, second = (
        (formula((2 * index + which).numpy().astype(np.uint32), SEEDS[4], site) + 0.5) / 2**32 for which in (0, 1)
    )
    radius = np.sqrt(-2 * np.log(first))
    np.testing.assert_allclose(found[0], radius * np.cos(2 * np.pi * second), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], radius * np.sin(2 * np.pi * second), rtol=1e-6, atol=1e-6)
    in_single = normal_pairs(index, torch.tensor(SEEDS[4]), site)
    assert all(torch.allclose(one.double(), other, atol=1e-6) for one, other in zip(in_single, found, strict=True))


def test_normal_pairs_are_finite_at_the_hashs_smallest_and_largest_words(monkeypatch):
    for word in (0, -1):
        monkeypatch.setattr(
            "common.ops.random_bits.reference.words", lambda index, *_, word=word: torch.full_like(index, word)
        )
        pair = normal_pairs(torch.tensor([0]), torch.tensor(0))
        assert all(value.isfinite().all() and value.abs().max() < 6.8 for value in pair)


SCALE = 65536 / (65536 - 6554)  # of p = 0.1
SEED = torch.tensor(0x1234_5678_9ABC)


# Masks: each element has 16 bits of a word


def kept(seed: int, site: int, index: int, dropped: int) -> bool:
    word = int(formula(np.array([index >> 1], np.uint32), seed, site)[0])
    return (word >> 16 if index % 2 else word % 2**16) >= dropped


@pytest.mark.parametrize("seed", [0, 1, 0xFFFF_FFFF, 0x1234_5678_9ABC_DEF0, -1])
@pytest.mark.parametrize("site", [0, 1, 73, 2**31 + 5])
def test_mask_is_the_defined_hash(seed, site):
    indices = [*range(20), 2**16 - 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    found = keep_mask(torch.tensor(seed), site, torch.tensor(indices), 0.5)
    assert found.tolist() == [kept(seed, site, index, 32768) for index in indices]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
def test_mask_of_a_count_is_that_of_its_indices(count):
    assert torch.equal(keep_mask(SEED, 3, count, 0.5), keep_mask(SEED, 3, torch.arange(count), 0.5))


@pytest.mark.parametrize("width", [8, 7])
def test_mask_of_rows_is_that_of_their_elements(width):
    rows = torch.tensor([[0, 5], [2**20, 9]])
    indices = rows.unsqueeze(-1) * width + torch.arange(width)
    assert torch.equal(keep_rows(SEED, 3, rows, width, 0.5), keep_mask(SEED, 3, indices, 0.5))


def within(share: Tensor | float, expected: float, count: int, sigmas: float = 5.0) -> bool:
    return abs(float(share) - expected) < sigmas * math.sqrt(expected * (1 - expected) / count)


COUNT = 1 << 19


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_dropped_elements_is_p(p):
    masks = [keep_mask(torch.tensor(seed), site, COUNT, p) for seed in range(3) for site in range(3)]
    assert all(within(1 - mask.sum() / COUNT, round(p * 65536) / 65536, COUNT) for mask in masks)


def test_masks_of_seeds_and_sites_are_independent():
    seeds = [0, 1, 2**32, 2**32 + 1]
    masks = [keep_mask(torch.tensor(seed), site, COUNT, 0.5) for seed in seeds for site in range(4)]
    assert all(within((a == b).sum() / COUNT, 0.5, COUNT) for a, b in itertools.combinations(masks, 2))


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 512, 1024, 16 * 512])
def test_masks_of_neighbours_are_independent(distance):
    mask = keep_mask(SEED, 5, COUNT, 0.5)
    agree = (mask[distance:] == mask[:-distance]).double().mean()
    assert within(agree, 0.5, COUNT - distance)


def test_dropout_scales_what_it_keeps_and_its_gradient_alike():
    x = wide(6, 5).requires_grad_()
    y = dropout_reference(x, 0.1, SEED, 2)
    y.sum().backward()
    mask = keep_mask(SEED, 2, 30, 0.1).view(6, 5)
    assert torch.equal(y, x * mask * SCALE)
    assert torch.equal(x.grad, mask.double() * SCALE)


def test_no_dropout_returns_its_input():
    x = wide(4)
    assert dropout_reference(x, 0.0, SEED, 0) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999999])
def test_impossible_probability_is_an_error(p):
    with pytest.raises(ValueError, match="dropout probability"):
        threshold(p)


# Attention: H 2, D 8, sequences of up to 6 tokens that neither touch nor stand in order.

H, D, L, T = 2, 8, 6, 20
STARTS, LENGTHS = [9, 1, 0, 16], [6, 5, 0, 1]


def sequences() -> tuple[Tensor, Tensor]:
    return torch.tensor(STARTS, dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)


def outside() -> list[int]:
    inside = {t for start, length in zip(STARTS, LENGTHS, strict=True) for t in range(start, start + length)}
    return [t for t in range(T) if t not in inside]


def attention_by_sequence(qkv: Tensor, p: float) -> Tensor:
    context = torch.zeros(T, H, D, dtype=qkv.dtype)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        for h in range(H):
            q, k, v = qkv[start : start + length, :, h].unbind(1)
            probabilities = (q @ k.T / math.sqrt(D)).softmax(1)
            if p:
                keep = [
                    [kept(int(SEED), 4, ((start + i) * H + h) * L + j, threshold(p)) for j in range(length)]
                    for i in range(length)
                ]
                probabilities = probabilities * torch.tensor(keep).view(length, length) * SCALE
            context[start : start + length, h] = probabilities @ v
    return context


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_attention_is_that_of_each_sequence_alone(p):
    qkv, weights = wide(T, 3, H, D).requires_grad_(), wide(T, H, D, seed=1)
    found = attention_reference(qkv, *sequences(), L, DropoutMask(p, SEED, 4))
    expected = attention_by_sequence(qkv, p)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((y * weights).sum(), qkv)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_rows_outside_sequences_are_zero_even_where_the_buffer_is_not_a_number():
    qkv = wide(T, 3, H, D)
    qkv[outside()] = math.nan
    qkv.requires_grad_()
    context = attention_reference(qkv, *sequences(), L, DropoutMask(0.1, SEED, 4))
    context.square().sum().backward()
    assert torch.isfinite(context).all()
    assert torch.isfinite(qkv.grad).all()
    assert not context[outside()].any()
    assert not qkv.grad[outside()].any()


@pytest.mark.slow
def test_attention_hands_the_gradient_to_a_bias_that_was_added_before():
    qkv, bias = wide(T, 3, H, D).requires_grad_(), wide(3 * H * D, seed=1).requires_grad_()

    def biased(qkv: Tensor, bias: Tensor) -> Tensor:
        return attention_reference(qkv + bias.detach().view(3, H, D), *sequences(), L, DropoutMask(0.1, SEED, 4), bias)

    assert torch.equal(
        biased(qkv, bias), attention_reference(qkv + bias.view(3, H, D), *sequences(), L, DropoutMask(0.1, SEED, 4))
    )
    # nearly all of a difference quotient along a key's bias is rounding: it adds the same to all scores of a row
    assert torch.autograd.gradcheck(biased, (qkv, bias), atol=1e-7)


def test_a_bias_has_no_gradient_from_rows_outside_sequences():
    qkv = wide(T, 3, H, D)
    qkv[outside()] = math.nan
    qkv.requires_grad_()
    bias = wide(3 * H * D, seed=1).requires_grad_()
    attention_reference(qkv, *sequences(), L, DropoutMask(0.1, SEED, 4), bias).square().sum().backward()
    torch.testing.assert_close(bias.grad, qkv.grad.sum(0).flatten(), rtol=1e-12, atol=1e-12)


def test_attention_in_half_precision_computes_in_single():
    qkv = wide(T, 3, H, D).bfloat16()
    found = attention_reference(qkv, *sequences(), L, DropoutMask(0.0, SEED, 4))
    assert torch.equal(found, attention_reference(qkv.float(), *sequences(), L, DropoutMask(0.0, SEED, 4)).bfloat16())


# What ends a sub-layer.


def norm_by_hand(z: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    centred = z - z.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(1, keepdims=True) + epsilon) * weight + bias


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("parts", ["neither", "bias", "residual", "both"])
def test_dropout_add_norm_is_its_formula(p, parts):
    x, weight, norm_bias = wide(5, 6), wide(6, seed=1), wide(6, seed=2)
    bias = wide(6, seed=3) if parts in ("bias", "both") else None
    residual = wide(5, 6, seed=4) if parts in ("residual", "both") else None
    z = x.numpy() + (0 if bias is None else bias.numpy())
    if p:
        z = z * np.array([kept(int(SEED), 9, i, threshold(p)) for i in range(30)]).reshape(5, 6) * SCALE
    expected = norm_by_hand(z + (0 if residual is None else residual.numpy()), weight.numpy(), norm_bias.numpy(), 0.01)
    found = dropout_add_norm_reference(x, bias, residual, weight, norm_bias, 0.01, DropoutMask(p, SEED, 9))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_dropout_add_norm_in_half_precision_rounds_once():
    x, bias, residual, weight, norm_bias = (
        t.bfloat16() for t in (wide(5, 6), wide(6), wide(5, 6, seed=1), wide(6, seed=2), wide(6, seed=3))
    )
    found = dropout_add_norm_reference(x, bias, residual, weight, norm_bias, 1e-12, DropoutMask(0.1, SEED, 1))
    single = (t.float() for t in (x, bias, residual, weight, norm_bias))
    assert torch.equal(found, dropout_add_norm_reference(*single, 1e-12, DropoutMask(0.1, SEED, 1)).bfloat16())


def test_bias_gelu_is_the_tanh_form():
    x, bias = wide(40, 3) * 3, wide(3, seed=1)
    z = (x + bias).numpy()
    expected = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    np.testing.assert_allclose(bias_gelu_reference(x, bias).numpy(), expected, rtol=1e-12, atol=1e-14)


# Cross-entropy: 5 words in 8 columns.


def test_cross_entropy_knows_no_padding_columns():
    logits = wide(4, 8)
    logits[:, 5:] = 100.0
    logits.requires_grad_()
    labels = torch.tensor([0, 4, 2, 2], dtype=torch.int32)
    losses, correct = masked_cross_entropy_reference(logits, labels, 5)
    losses.sum().backward()
    words = logits[:, :5].detach().numpy()
    chances = np.exp(words) / np.exp(words).sum(1, keepdims=True)
    np.testing.assert_allclose(losses.detach().numpy(), -np.log(chances[range(4), labels]), rtol=1e-12)
    np.testing.assert_allclose(logits.grad[:, :5].numpy(), chances - np.eye(5)[labels], rtol=1e-12, atol=1e-12)
    assert not logits.grad[:, 5:].any()
    assert correct.tolist() == (words.argmax(1) == labels.numpy()).tolist()


def test_rows_without_a_label_do_not_count_whatever_their_logits():
    logits = wide(3, 8)
    logits[1] = math.nan
    logits.requires_grad_()
    losses, correct = masked_cross_entropy_reference(logits, torch.tensor([1, -1, -1], dtype=torch.int32), 5)
    losses.sum().backward()
    assert losses[1:].tolist() == [0.0, 0.0]
    assert correct[1:].tolist() == [False, False]
    assert not logits.grad[1:].any()


def test_the_first_of_equal_logits_is_the_prediction():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).expand(2, 4)
    _, correct = masked_cross_entropy_reference(logits, torch.tensor([1, 2]), 4)
    assert correct.tolist() == [True, False]


def test_losses_of_half_precision_logits_are_single():
    logits = (wide(3, 8) * 10).half()
    losses, _ = masked_cross_entropy_reference(logits, torch.tensor([0, 1, 2]), 8)
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), torch.tensor([0, 1, 2]), reduction="none"))


# Linear layers.


def test_linear_leaves_its_bias_to_the_caller():
    layer = Linear(3, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(wide(4, 3))
        layer.bias.copy_(wide(4, seed=1))
    x = wide(2, 3, seed=2)
    product = x.numpy() @ layer.weight.detach().numpy().T
    np.testing.assert_allclose(layer(x, add_bias=False).detach().numpy(), product, rtol=1e-12)
    np.testing.assert_allclose(layer(x).detach().numpy(), product + layer.bias.detach().numpy(), rtol=1e-12)


def test_linear_leaves_the_gradient_of_its_bias_to_the_caller():
    layer = Linear(3, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(wide(4, 3))
        layer.bias.copy_(wide(4, seed=1))
    x = wide(2, 3, seed=2)
    y = layer(x, bias_gradient=False)
    y.sum().backward()
    assert torch.equal(y, layer(x))
    assert layer.bias.grad is None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(4, 3), rtol=1e-12, atol=0)


def test_an_unknown_product_is_named_with_those_there_are():
    with pytest.raises(UnsupportedImplementation, match=r"no implementation 'int1'; choose one of auto, .*reference"):
        Linear(3, 4).choose("int1")


# Cross-entropy with a vocabulary that is sharded over ranks


M, WORDS, COLUMNS = 9, 20, 8
"""Rows, vocabulary, and columns of a shard. The third shard has 4 columns of padding; a fourth has only padding."""

LOG_SUM_EXP, GRADIENT = OF_A_PART.reference


def test_parts_give_the_loss_and_the_gradient_of_the_whole():
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(M, WORDS, generator=generator, dtype=torch.float64).mul_(3).requires_grad_()
    labels = torch.tensor([0, 7, 8, 15, 16, 19, NO_LABEL, 3, NO_LABEL])
    d_losses = torch.randn(M, generator=generator, dtype=torch.float64)
    losses = F.cross_entropy(whole, labels, ignore_index=NO_LABEL, reduction="none")
    (wanted,) = torch.autograd.grad(losses, whole, d_losses)
    padding = torch.full((M, 4 * COLUMNS - WORDS), 50.0, dtype=torch.float64)
    parts = [part.clone() for part in torch.cat([whole.detach(), padding], 1).split(COLUMNS, 1)]
    words = [8, 8, 4, 0]
    lses = [LOG_SUM_EXP(part, labels, count) for part, count in zip(parts, words, strict=True)]
    assert bool((lses[3] == float("-inf")).all())
    lse = torch.stack(lses).logsumexp(0)
    scored = labels != NO_LABEL
    of_label = whole.detach().gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close((lse - of_label)[scored], losses[scored])
    found = []
    for number, (part, count) in enumerate(zip(parts, words, strict=True)):
        local = labels - number * COLUMNS
        sequences = torch.where((local >= 0) & (local < COLUMNS), local, COLUMNS).masked_fill(~scored, NO_LABEL)
        made = GRADIENT(d_losses, part, sequences, lse, count)
        assert made is part, "in the place of the logits"
        found.append(made)
    joined = torch.cat(found, 1)
    torch.testing.assert_close(joined[:, :WORDS], wanted)
    assert not joined[:, WORDS:].any()


@pytest.mark.parametrize("anything", [float("nan"), float("inf")])
def test_rows_without_a_label_have_no_gradient_whatever_they_are(anything):
    logits = torch.full((2, COLUMNS), anything)
    labels = torch.tensor([NO_LABEL, NO_LABEL])
    assert not GRADIENT(torch.ones(2), logits, labels, torch.full((2,), anything), 5).any()
