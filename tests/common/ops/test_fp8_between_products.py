"""Test FP8 tensors that an operation writes for the next product, and gradients that it hands to the previous product.

The expected values are float64 products of operands that the test quantizes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from common.ops.bias_gelu import bias_gelu_reference
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout_add_norm import dropout_add_norm_reference
from common.ops.linear import Linear
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, Fp8LinearProduct
from tests import fp8_oracle as oracle
from tests.drawn_tensors import normal
from tests.fp8_oracle import E4M3, E5M2

TOKENS, WIDTH, INNER = 48, 32, 64
STEP = 2.0**-8
"""Largest relative error of rounding to bf16."""


def linear(columns: int, rows: int) -> Linear:
    layer = Linear(columns, rows, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(normal(rows, columns, seed=rows, dtype=torch.float32) / math.sqrt(columns))
        layer.bias.copy_(normal(rows, seed=1))
    layer.choose("fp8")
    return layer


def scale(layer: Linear, role: int) -> np.float32:
    assert isinstance(layer.product, Fp8LinearProduct)
    return np.float32(layer.product.scales[role].item())


def quantised(values: np.ndarray, with_scale: np.float32, dtype: torch.dtype) -> np.ndarray:
    """Return float64 values after quantization to FP8."""
    return oracle.quantised(torch.from_numpy(values), with_scale, dtype)


def assert_close(found: Tensor | None, expected: np.ndarray) -> None:
    """Check that values are equal up to rounding to bf16."""
    assert found is not None
    size = np.abs(expected).max()
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=1.01 * STEP, atol=1e-4 * size)


def gelu_and_slope(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tanh form of GELU, and its derivative."""
    factor = math.sqrt(2 / math.pi)
    tanh = np.tanh(factor * (z + 0.044715 * z**3))
    slope = 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * factor * (1 + 3 * 0.044715 * z**2)
    return 0.5 * z * (1 + tanh), slope


def test_gelu_between_two_products_equals_products_of_quantised_operands():
    up, down, kept = linear(WIDTH, INNER), linear(INNER, WIDTH), []
    up.register_forward_hook(lambda module, given, result: kept.append(result))
    x, dy = normal(TOKENS, WIDTH).requires_grad_(), normal(TOKENS, WIDTH, seed=5)
    for use in range(2):  # the second has the scales of the first, whose tensors are the same
        x.grad = None
        for layer in (up, down):
            layer.zero_grad()
        scales = {layer: [scale(layer, role) for role in (INPUT, WEIGHT, GRADIENT)] for layer in (up, down)}
        handover = up.handover()
        assert handover is not None
        h8 = bias_gelu_reference(
            up(x, add_bias=False, handover=handover), up.bias, fp8=down.input_scaling(), handover=handover
        )
        y = down(h8)
        y.backward(dy)
        assert handover.take() is None, use

    z, dx16 = kept[-1].detach().double().numpy(), dy.double().numpy()
    h, slope = gelu_and_slope(z + up.bias.detach().double().numpy())
    qx, qh = quantised(x.detach().double().numpy(), scales[up][INPUT], E4M3), quantised(h, scales[down][INPUT], E4M3)
    q_up = quantised(up.weight.detach().double().numpy(), scales[up][WEIGHT], E4M3)
    q_down = quantised(down.weight.detach().double().numpy(), scales[down][WEIGHT], E4M3)
    assert_close(kept[-1], qx @ q_up.T)
    assert_close(y, qh @ q_down.T + down.bias.detach().double().numpy())

    qdy = quantised(dx16, scales[down][GRADIENT], E5M2)
    assert_close(down.weight.grad, qdy.T @ qh)
    dh = torch.from_numpy(qdy @ q_down).to(torch.bfloat16).double().numpy()
    dz = dh * slope
    qdz = quantised(dz, scales[up][GRADIENT], E5M2)
    for found, expected in ((x.grad, qdz @ q_up), (up.weight.grad, qdz.T @ qx), (up.bias.grad, dz.sum(0))):
        error = np.linalg.norm(found.double().numpy() - expected) / np.linalg.norm(expected)
        assert error < 0.02  # dh is rounded to bf16: the other neighbour, now and then, moves a code of e5m2 as well
    for layer, h_or_x, gradient in ((up, x.detach().double().numpy(), dz), (down, h, dx16)):
        assert scale(layer, INPUT) == pytest.approx(oracle.scale_of(np.abs(h_or_x).max(), E4M3), rel=1e-6)
        assert scale(layer, GRADIENT) == pytest.approx(oracle.scale_of(np.abs(gradient).max(), E5M2), rel=STEP)


def test_without_gradients_nothing_is_written_in_fp8():
    up, down = linear(WIDTH, INNER), linear(INNER, WIDTH)
    with torch.no_grad():
        assert up.handover() is None
        assert down.input_scaling() is None


def test_a_product_in_16_bits_asks_for_nothing_in_fp8():
    layer = Linear(WIDTH, INNER)
    assert layer.handover() is None
    assert layer.input_scaling() is None


def test_a_gradient_that_nobody_hands_over_is_cast():
    x, dy = normal(TOKENS, WIDTH), normal(TOKENS, INNER, seed=5)
    given, plain = linear(WIDTH, INNER), linear(WIDTH, INNER)
    given(x, add_bias=False, handover=given.handover()).backward(dy)
    plain(x, add_bias=False).backward(dy)
    assert torch.equal(given.weight.grad, plain.weight.grad)


def test_a_handover_leaves_nothing_for_a_bias():
    layer = linear(WIDTH, INNER)
    with pytest.raises(ValueError, match="detach"):
        layer(normal(TOKENS, WIDTH), handover=layer.handover())
    layer(normal(TOKENS, WIDTH), bias_gradient=False, handover=layer.handover())


def test_two_forward_passes_each_have_a_handover():
    up, bias = linear(WIDTH, INNER), normal(INNER, seed=1)
    batches = [(normal(TOKENS, WIDTH, seed=s), normal(TOKENS, INNER, seed=9 + s) * 10**s) for s in (0, 1)]
    handovers, outputs = [], []
    for x, _ in batches:
        handovers.append(up.handover())
        outputs.append(bias_gelu_reference(up(x, add_bias=False, handover=handovers[-1]), bias, handover=handovers[-1]))
    for (x, dy), y in reversed(list(zip(batches, outputs, strict=True))):
        up.zero_grad()
        assert isinstance(y, Tensor)
        y.backward(dy)
        z = (x.double() @ up.weight.detach().double().T).numpy()
        _, slope = gelu_and_slope(z + bias.double().numpy())
        expected = (dy.double().numpy() * slope).T @ x.double().numpy()
        error = np.linalg.norm(up.weight.grad.double().numpy() - expected) / np.linalg.norm(expected)
        assert error < 0.15  # what two bits of e5m2 leave; the other gradient is ten times as large


def sub_layer(fused: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and all gradients of a product, dropout, residual, norm, and the next product."""
    out, up = linear(WIDTH, WIDTH), linear(WIDTH, INNER)
    weight, bias = (normal(WIDTH, seed=seed).requires_grad_() for seed in (3, 4))
    x, residual = normal(TOKENS, WIDTH).requires_grad_(), normal(TOKENS, WIDTH, seed=6).requires_grad_()
    leaves = [out.weight, out.bias, up.weight, up.bias, weight, bias, x, residual]
    mask = DropoutMask(0.1, torch.tensor(5), 3)
    for _ in range(2):  # the second has the scales of the first, whose tensors are the same
        handover = out.handover() if fused else None
        y = out(x, add_bias=False, handover=handover)
        first, second = dropout_add_norm_reference(
            y, out.bias, residual, weight, bias, 1e-12, mask, True,
            fp8=up.input_scaling() if fused else None, handover=handover,
        )  # fmt: skip
        z = up(first)
        gradients = torch.autograd.grad([z, second], leaves, [normal(TOKENS, INNER, seed=7), normal(TOKENS, WIDTH)])
    return [z, second], list(gradients)


def test_a_norm_that_writes_fp8_gives_what_casts_give():
    results, gradients = sub_layer(fused=True)
    expected, expected_gradients = sub_layer(fused=False)
    for found, plain in zip(results, expected, strict=True):
        assert torch.equal(found, plain)
    behind_the_norm = slice(1, -2)  # those before it come through FP8 of a gradient that was not rounded to bf16 first
    for found, plain in zip(gradients[behind_the_norm], expected_gradients[behind_the_norm], strict=True):
        assert torch.equal(found, plain)
    for found, plain in zip(gradients, expected_gradients, strict=True):
        assert (found.double() - plain.double()).norm() < 0.05 * plain.double().norm()
