"""The plain operations of a transformer against formulas written out here."""

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
from common.ops.cross_entropy import masked_cross_entropy_reference
from common.ops.dropout.reference import DropoutMask, dropout_reference, keep_mask, keep_rows, threshold
from common.ops.dropout_add_norm import dropout_add_norm_reference
from common.ops.linear import Linear

SCALE = 65536 / (65536 - 6554)  # of p = 0.1
SEED = torch.tensor(0x1234_5678_9ABC)


def wide(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# The mask's definition on Python's integers, one element at a time.


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def kept(seed: int, site: int, index: int, dropped: int) -> bool:
    low, high = seed % 2**32, seed % 2**64 >> 32
    k1 = mix(low ^ mix((site * 0x9E3779B9 + 1) % 2**32))
    k2 = mix((high + mix(k1 ^ site)) % 2**32)
    word = mix(mix((index >> 1) ^ k1) ^ k2)
    return (word >> 16 if index % 2 else word % 2**16) >= dropped


@pytest.mark.parametrize("seed", [0, 1, 0xFFFF_FFFF, 0x1234_5678_9ABC_DEF0, -1])
@pytest.mark.parametrize("site", [0, 1, 73, 2**31 + 5])
def test_mask_is_the_defined_hash(seed: int, site: int) -> None:
    indices = [*range(20), 2**16 - 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    found = keep_mask(torch.tensor(seed), site, torch.tensor(indices), 0.5)
    assert found.tolist() == [kept(seed, site, index, 32768) for index in indices]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
def test_mask_of_a_count_is_that_of_its_indices(count: int) -> None:
    assert torch.equal(keep_mask(SEED, 3, count, 0.5), keep_mask(SEED, 3, torch.arange(count), 0.5))


@pytest.mark.parametrize("width", [8, 7])
def test_mask_of_rows_is_that_of_their_elements(width: int) -> None:
    rows = torch.tensor([[0, 5], [2**20, 9]])
    indices = rows.unsqueeze(-1) * width + torch.arange(width)
    assert torch.equal(keep_rows(SEED, 3, rows, width, 0.5), keep_mask(SEED, 3, indices, 0.5))


def within(share: Tensor | float, expected: float, count: int, sigmas: float = 5.0) -> bool:
    return abs(float(share) - expected) < sigmas * math.sqrt(expected * (1 - expected) / count)


COUNT = 1 << 19


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_dropped_elements_is_p(p: float) -> None:
    masks = [keep_mask(torch.tensor(seed), site, COUNT, p) for seed in range(3) for site in range(3)]
    assert all(within(1 - mask.sum() / COUNT, round(p * 65536) / 65536, COUNT) for mask in masks)


def test_masks_of_seeds_and_sites_are_independent() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1]
    masks = [keep_mask(torch.tensor(seed), site, COUNT, 0.5) for seed in seeds for site in range(4)]
    assert all(within((a == b).sum() / COUNT, 0.5, COUNT) for a, b in itertools.combinations(masks, 2))


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 512, 1024, 16 * 512])
def test_masks_of_neighbours_are_independent(distance: int) -> None:
    mask = keep_mask(SEED, 5, COUNT, 0.5)
    agree = (mask[distance:] == mask[:-distance]).double().mean()
    assert within(agree, 0.5, COUNT - distance)


def test_dropout_scales_what_it_keeps_and_its_gradient_alike() -> None:
    x = wide(6, 5).requires_grad_()
    y = dropout_reference(x, 0.1, SEED, 2)
    y.sum().backward()
    mask = keep_mask(SEED, 2, 30, 0.1).view(6, 5)
    assert torch.equal(y, x * mask * SCALE)
    assert torch.equal(x.grad, mask.double() * SCALE)


def test_no_dropout_returns_its_input() -> None:
    x = wide(4)
    assert dropout_reference(x, 0.0, SEED, 0) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999999])
def test_impossible_probability_is_an_error(p: float) -> None:
    with pytest.raises(ValueError, match="dropout probability"):
        threshold(p)


# Attention: H 2, D 8, sequences of up to 6 tokens that neither touch nor stand in order.

H, D, L, T = 2, 8, 6, 20
STARTS, LENGTHS = [9, 1, 0, 16], [6, 5, 0, 1]


def places() -> tuple[Tensor, Tensor]:
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
def test_attention_is_that_of_each_sequence_alone(p: float) -> None:
    qkv, weights = wide(T, 3, H, D).requires_grad_(), wide(T, H, D, seed=1)
    found = attention_reference(qkv, *places(), L, DropoutMask(p, SEED, 4))
    expected = attention_by_sequence(qkv, p)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((y * weights).sum(), qkv)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_rows_outside_sequences_are_zero_even_where_the_buffer_is_not_a_number() -> None:
    qkv = wide(T, 3, H, D)
    qkv[outside()] = math.nan
    qkv.requires_grad_()
    context = attention_reference(qkv, *places(), L, DropoutMask(0.1, SEED, 4))
    context.square().sum().backward()
    assert torch.isfinite(context).all()
    assert torch.isfinite(qkv.grad).all()
    assert not context[outside()].any()
    assert not qkv.grad[outside()].any()


def test_attention_hands_the_gradient_to_a_bias_that_was_added_before() -> None:
    qkv, bias = wide(T, 3, H, D).requires_grad_(), wide(3 * H * D, seed=1).requires_grad_()

    def biased(qkv: Tensor, bias: Tensor) -> Tensor:
        return attention_reference(qkv + bias.detach().view(3, H, D), *places(), L, DropoutMask(0.1, SEED, 4), bias)

    assert torch.equal(
        biased(qkv, bias), attention_reference(qkv + bias.view(3, H, D), *places(), L, DropoutMask(0.1, SEED, 4))
    )
    # nearly all of a difference quotient along a key's bias is rounding: it adds the same to all scores of a row
    assert torch.autograd.gradcheck(biased, (qkv, bias), atol=1e-7)


def test_a_bias_has_no_gradient_from_rows_outside_sequences() -> None:
    qkv = wide(T, 3, H, D)
    qkv[outside()] = math.nan
    qkv.requires_grad_()
    bias = wide(3 * H * D, seed=1).requires_grad_()
    attention_reference(qkv, *places(), L, DropoutMask(0.1, SEED, 4), bias).square().sum().backward()
    torch.testing.assert_close(bias.grad, qkv.grad.sum(0).flatten(), rtol=1e-12, atol=1e-12)


def test_attention_in_half_precision_computes_in_single() -> None:
    qkv = wide(T, 3, H, D).bfloat16()
    found = attention_reference(qkv, *places(), L, DropoutMask(0.0, SEED, 4))
    assert torch.equal(found, attention_reference(qkv.float(), *places(), L, DropoutMask(0.0, SEED, 4)).bfloat16())


# What ends a sub-layer.


def norm_by_hand(z: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    centred = z - z.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(1, keepdims=True) + epsilon) * weight + bias


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("parts", ["neither", "bias", "residual", "both"])
def test_dropout_add_norm_is_its_formula(p: float, parts: str) -> None:
    x, weight, norm_bias = wide(5, 6), wide(6, seed=1), wide(6, seed=2)
    bias = wide(6, seed=3) if parts in ("bias", "both") else None
    residual = wide(5, 6, seed=4) if parts in ("residual", "both") else None
    z = x.numpy() + (0 if bias is None else bias.numpy())
    if p:
        z = z * np.array([kept(int(SEED), 9, i, threshold(p)) for i in range(30)]).reshape(5, 6) * SCALE
    expected = norm_by_hand(z + (0 if residual is None else residual.numpy()), weight.numpy(), norm_bias.numpy(), 0.01)
    found = dropout_add_norm_reference(x, bias, residual, weight, norm_bias, 0.01, DropoutMask(p, SEED, 9))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_dropout_add_norm_in_half_precision_rounds_once() -> None:
    x, bias, residual, weight, norm_bias = (
        t.bfloat16() for t in (wide(5, 6), wide(6), wide(5, 6, seed=1), wide(6, seed=2), wide(6, seed=3))
    )
    found = dropout_add_norm_reference(x, bias, residual, weight, norm_bias, 1e-12, DropoutMask(0.1, SEED, 1))
    single = (t.float() for t in (x, bias, residual, weight, norm_bias))
    assert torch.equal(found, dropout_add_norm_reference(*single, 1e-12, DropoutMask(0.1, SEED, 1)).bfloat16())


def test_bias_gelu_is_the_tanh_form() -> None:
    x, bias = wide(40, 3) * 3, wide(3, seed=1)
    z = (x + bias).numpy()
    expected = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    np.testing.assert_allclose(bias_gelu_reference(x, bias).numpy(), expected, rtol=1e-12, atol=1e-14)


# Cross-entropy: 5 words in 8 columns.


def test_cross_entropy_knows_no_padding_columns() -> None:
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


def test_rows_without_a_label_do_not_count_whatever_their_logits() -> None:
    logits = wide(3, 8)
    logits[1] = math.nan
    logits.requires_grad_()
    losses, correct = masked_cross_entropy_reference(logits, torch.tensor([1, -1, -1], dtype=torch.int32), 5)
    losses.sum().backward()
    assert losses[1:].tolist() == [0.0, 0.0]
    assert correct[1:].tolist() == [False, False]
    assert not logits.grad[1:].any()


def test_the_first_of_equal_logits_is_the_prediction() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).expand(2, 4)
    _, correct = masked_cross_entropy_reference(logits, torch.tensor([1, 2]), 4)
    assert correct.tolist() == [True, False]


def test_losses_of_half_precision_logits_are_single() -> None:
    logits = (wide(3, 8) * 10).half()
    losses, _ = masked_cross_entropy_reference(logits, torch.tensor([0, 1, 2]), 8)
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), torch.tensor([0, 1, 2]), reduction="none"))


# Linear layers.


def test_linear_leaves_its_bias_to_the_caller() -> None:
    layer = Linear(3, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(wide(4, 3))
        layer.bias.copy_(wide(4, seed=1))
    x = wide(2, 3, seed=2)
    product = x.numpy() @ layer.weight.detach().numpy().T
    np.testing.assert_allclose(layer(x, add_bias=False).detach().numpy(), product, rtol=1e-12)
    np.testing.assert_allclose(layer(x).detach().numpy(), product + layer.bias.detach().numpy(), rtol=1e-12)


def test_linear_leaves_the_gradient_of_its_bias_to_the_caller() -> None:
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


def test_an_unknown_product_is_named_with_those_there_are() -> None:
    with pytest.raises(UnsupportedImplementation, match=r"no implementation 'int1'; choose one of auto, .*reference"):
        Linear(3, 4).choose("int1")
