"""Test references of decoder operations against autograd of formulas, and against the definition of FP8."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.ops import bias_gelu, qkv_gradient, rope, swiglu, transpose_fp8
from common.ops.dropout.reference import DropoutMask, keep_mask
from common.ops.fp8_cast.reference import Fp8Tensor, widen_fp8
from common.ops.lora_input import Region, add_input_gradient_reference, dropped_norm_reference, dropped_reference
from common.ops.operation import OperationRequest
from common.ops.row_norm import LAYER_NORM_1P as LAYER_NORM
from common.ops.row_norm import RMS_NORM
from common.ops.transpose_fp8 import transpose_reference
from tests.drawn_tensors import assert_close, normal, scaling, wide
from tests.fp8_oracle import E4M3, E5M2, check_fp8

rms_norm, layer_norm = RMS_NORM.reference, LAYER_NORM.reference


SEED = torch.tensor(0x1234_5678_9ABC)
KEPT = 65536 / (65536 - 6554)  # of p = 0.1


# RMSNorm


def rms_norm_by_formula(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / torch.sqrt((x**2).mean(-1, keepdim=True) + epsilon)


@pytest.mark.parametrize("added", [True, False])
def test_rms_norm_and_its_gradient(added):
    residual, weight = wide(5, 12).requires_grad_(), wide(12, seed=1).requires_grad_()
    delta = wide(5, 12, seed=2).requires_grad_() if added else None
    x = residual if delta is None else residual + delta
    y = rms_norm_by_formula(x, weight, 0.01)
    found = rms_norm.forward(residual, delta, weight, 0.01)
    assert_close(found.y, y.detach())
    assert_close(found.residual, x.detach())
    assert (found.residual is residual) == (not added)
    assert_close(rms_norm.recompute(found.residual, found.moments, weight), y.detach())

    dy, d_residual = wide(5, 12, seed=3), wide(5, 12, seed=4)
    (of_weight,) = torch.autograd.grad(y, weight, dy, retain_graph=True)
    assert_close(rms_norm.parameter_gradients(dy, found.residual, found.moments)[0], of_weight)
    leaf = residual if delta is None else delta
    (alone,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
    assert_close(rms_norm.backward(dy, found.residual, found.moments, weight)[0], alone)
    (both,) = torch.autograd.grad([y, x] if added else y, leaf, [dy, d_residual] if added else dy)
    both = both if added else both + d_residual
    assert_close(rms_norm.backward(dy, found.residual, found.moments, weight, d_residual)[0], both)


def test_rms_norm_adds_in_the_dtype_of_the_residual_and_computes_in_single():
    residual, delta, weight = normal(5, 12), normal(5, 12, seed=1), normal(12, seed=2)
    found = rms_norm.forward(residual, delta, weight, 1e-5)
    assert torch.equal(found.residual, (residual.float() + delta.float()).bfloat16())
    assert found.moments.dtype == torch.float32
    expected = rms_norm_by_formula(found.residual.float(), weight.float(), 1e-5)
    torch.testing.assert_close(found.y.float(), expected, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("scale", [0.0, 11.0])
def test_rms_norm_in_fp8_rounds_once(scale):
    residual, weight, state = normal(70, 48).float(), normal(48, seed=1).float(), scaling(scale)
    y = rms_norm.forward(residual, None, weight, 1e-5)
    found = rms_norm.forward(residual, None, weight, 1e-5, half=False, fp8=state)
    assert found.y is None
    assert y.y is not None
    check_fp8(found.y8, y.y, state, scale, E4M3)
    state = scaling(scale)
    dx, dx8 = rms_norm.backward(residual * 1e-7, residual, y.moments, weight, fp8=state)
    check_fp8(dx8, dx, state, scale, E5M2)


# RoPE


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Return x with its pairs (i, i + D/2), as complex numbers, multiplied by exp(i angle)."""
    size = x.shape[-1]
    frequencies = base ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angles = positions.double()[:, None, None] * frequencies
    pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def test_rope_turns_queries_and_keys_and_its_gradient_turns_back():
    heads, kv_heads, size = 4, 2, 6
    positions = torch.tensor([0, 1, 5, 8191, 17])
    cos, sin = rope.tables(positions, size, 100.0)
    qkv = wide(5, (heads + 2 * kv_heads) * size).requires_grad_()
    q, k, v = qkv.view(5, -1, size).split([heads, kv_heads, kv_heads], 1)
    expected = [rotated(q, positions, 100.0), rotated(k, positions, 100.0), v]
    found = rope.forward_reference(qkv, cos, sin, heads, kv_heads)
    for ours, reference in zip(found, expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, reference.detach(), rtol=1e-6, atol=1e-6)  # tables are fp32
    gradients = [wide(*part.shape, seed=seed) for seed, part in enumerate(found)]
    (reference,) = torch.autograd.grad(expected, qkv, gradients)
    torch.testing.assert_close(rope.backward_reference(*gradients, cos, sin)[0], reference, rtol=1e-6, atol=1e-6)


def test_rope_refuses_an_odd_head():
    with pytest.raises(ValueError, match="a head of 5"):
        rope.tables(torch.arange(3), 5, 1e4)


def test_gradient_of_rope_in_fp8():
    cos, sin = rope.tables(torch.arange(40), 8, 1e4)
    gradients = [wide(40, heads, 8, seed=heads).float() for heads in (2, 1, 1)]
    wide_gradient, _ = rope.backward_reference(*gradients, cos, sin)
    state = scaling(2.0)
    none, found = rope.backward_reference(*gradients, cos, sin, half=False, fp8=state)
    assert none is None
    assert wide_gradient is not None
    check_fp8(found, wide_gradient, state, 2.0, E5M2)


# SwiGLU


def test_swiglu_and_its_gradient():
    gate_up, dy = (wide(5, 14) * 3).requires_grad_(), wide(5, 7, seed=1)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    y = gate / (1 + torch.exp(-gate)) * up
    found = swiglu.forward_reference(gate_up)
    assert_close(found.y, y.detach())
    assert found.saved is gate_up
    (expected,) = torch.autograd.grad(y, gate_up, dy)
    assert_close(swiglu.backward_reference(dy, gate_up)[0], expected)


@pytest.mark.parametrize("scale", [0.0, 2.5])
def test_swiglu_in_fp8(scale):
    gate_up, dy = wide(70, 32).float(), wide(70, 16, seed=1).float() * 1e-6
    y = swiglu.forward_reference(gate_up).y
    state, saved_state = scaling(scale), scaling(scale)
    found = swiglu.forward_reference(gate_up, fp8=state, save_fp8=saved_state)
    assert found.y is None
    assert y is not None
    check_fp8(found.y8, y, state, scale, E4M3)
    assert isinstance(found.saved, Fp8Tensor)
    check_fp8(found.saved, gate_up, saved_state, scale, E4M3)
    kept = widen_fp8(found.saved)
    assert (kept - gate_up).norm() < 0.05 * gate_up.norm()
    state = scaling(scale)
    expected, _ = swiglu.backward_reference(dy, kept)
    none, d_gate_up8 = swiglu.backward_reference(dy, found.saved, fp8=state)
    assert none is None
    assert expected is not None
    check_fp8(d_gate_up8, expected, state, scale, E5M2)


def test_frozen_scales_of_swiglu_are_used_and_stay():
    state, unknown = scaling(2.5), scaling()
    found = swiglu.forward_reference(wide(8, 32).float(), fp8=state, save_fp8=unknown, frozen_scales=True)
    assert found.y8.scale_inverse == 1 / 2.5
    assert (state.scale, unknown.scale) == (2.5, 0.0)


# The input of an adapter


def test_the_dropout_of_an_adapter_is_that_of_the_elements_numbers():
    x = wide(3, 10)
    region = Region(torch.tensor([4, 0, 9]), 64, 20)
    numbers = [[row * 64 + 20 + column for column in range(10)] for row in (4, 0, 9)]
    keep = keep_mask(SEED, 7, torch.tensor(numbers), 0.1)
    assert not keep.all()
    assert torch.equal(dropped_reference(x, DropoutMask(0.1, SEED, 7), region), x * keep * KEPT)


def test_parts_of_a_tensor_have_its_mask():
    x, mask = wide(12, 16), DropoutMask(0.5, SEED, 7)
    whole = dropped_reference(x, mask)
    rows = torch.tensor([2, 11, 5])
    assert torch.equal(dropped_reference(x[rows, 8:], mask, Region(rows, 16, 8)), whole[rows, 8:])


def test_the_gradient_of_an_adapters_input_passes_its_dropout():
    x, a, du, dx = wide(6, 10).requires_grad_(), wide(3, 10, seed=1), wide(6, 3, seed=2), wide(6, 10, seed=3)
    keep = keep_mask(SEED, 7, 60, 0.1).view(6, 10)
    (expected,) = torch.autograd.grad((x * keep * KEPT) @ a.t(), x, du)
    found = add_input_gradient_reference(dx.clone(), du, a, DropoutMask(0.1, SEED, 7))
    assert_close(found, dx + expected)


def test_dropout_of_a_norm_is_made_from_what_the_norm_kept():
    residual, weight, mask = normal(6, 10), normal(10, seed=1), DropoutMask(0.1, SEED, 7)
    normed = rms_norm.forward(residual, None, weight, 1e-5)
    assert normed.y is not None
    found = dropped_norm_reference(residual, normed.moments, weight, mask)
    assert torch.equal(found, dropped_reference(normed.y, mask))


# Transposes


def test_a_weight_is_transposed_into_the_scratch():
    weight, scratch = wide(3, 5).to(E4M3), torch.zeros(20, dtype=E4M3)
    found = transpose_reference(weight, scratch)
    assert found.data_ptr() == scratch.data_ptr()
    assert found.float().tolist() == [list(column) for column in zip(*weight.float().tolist(), strict=True)]


@pytest.mark.parametrize(("size", "dtype", "what"), [(14, E4M3, "of 14 elements"), (20, E5M2, "float8_e5m2")])
def test_a_scratch_that_does_not_fit_is_an_error(size, dtype, what):
    with pytest.raises(ValueError, match=what):
        transpose_reference(wide(3, 5).to(E4M3), torch.zeros(size, dtype=dtype))


def test_transposes_are_of_bytes():
    request = OperationRequest(torch.device("cuda"), torch.bfloat16)
    assert "8 bits" in str(transpose_fp8.TRANSPOSE_FP8.unsupported("triton", request))


def test_angles_of_the_last_position_are_exact_to_single_precision():
    cos, sin = rope.tables(torch.tensor([8191]), 128, 10_000.0)
    for pair in (0, 1, 63):
        angle = 8191 * 10_000.0 ** (-pair / 64)
        assert cos[0, pair] == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[0, pair] == pytest.approx(math.sin(angle), abs=1e-7)


# LayerNorm


def layer_norm_by_formula(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + epsilon) * (1 + weight) + bias


@pytest.mark.parametrize("given", ["both", "delta", "bias", "neither"])
def test_layer_norm_and_its_gradients(given):
    residual, weight, bias = (wide(*shape, seed=seed) for seed, shape in enumerate(((5, 12), (12,), (12,))))
    delta = wide(5, 12, seed=3).requires_grad_() if given in ("both", "delta") else None
    added = wide(12, seed=4).requires_grad_() if given in ("both", "bias") else None
    leaves = [x.requires_grad_() for x in (residual, weight, bias)]
    x = residual
    for each in (delta, added):
        x = x if each is None else x + each
    y = layer_norm_by_formula(x, weight, bias, 0.01)
    found = layer_norm.forward(residual, delta, weight, 0.01, bias, added)
    assert_close(found.y, y.detach())
    assert_close(found.residual, x.detach())
    assert (found.residual is residual) == (given == "neither")
    assert_close(layer_norm.recompute(found.residual, found.moments, weight, bias), y.detach())

    dy, d_residual = wide(5, 12, seed=5), wide(5, 12, seed=6)
    alone = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    dx, none = layer_norm.backward(dy, found.residual, found.moments, weight)
    assert_close(dx, alone[0])
    assert none is None
    total = (y * dy).sum() + (x * d_residual).sum()
    d_leaf, *of_added = torch.autograd.grad(total, [residual, *([] if added is None else [added])])
    dx, _ = layer_norm.backward(dy, found.residual, found.moments, weight, d_residual)
    assert_close(dx, d_leaf)
    sums = layer_norm.parameter_gradients(dy, found.residual, found.moments, None if added is None else dx)
    for each, expected in zip(sums, [*alone[1:], *of_added], strict=True):
        assert_close(each, expected)


def test_layer_norm_adds_up_in_single_precision_and_rounds_once():
    residual, delta, added = normal(5, 12), normal(5, 12, seed=1), normal(12, seed=2)
    weight, bias = normal(12, seed=3), normal(12, seed=4)
    found = layer_norm.forward(residual, delta, weight, 1e-5, bias, added)
    assert torch.equal(found.residual, (residual.double() + delta.double() + added.double()).bfloat16())
    assert found.moments.dtype == torch.float32
    expected = layer_norm_by_formula(found.residual.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(found.y.double(), expected, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 11.0])
def test_layer_norm_in_fp8_rounds_once(scale):
    """FP8 values are rounded from the fp32 results, not from values that were rounded to 16 bits."""
    residual, weight, bias = normal(70, 48), normal(48, seed=1).float(), normal(48, seed=2).float()
    state = scaling(scale)
    y = layer_norm.forward(residual.float(), None, weight, 1e-5, bias)
    found = layer_norm.forward(residual, None, weight, 1e-5, bias, half=False, fp8=state)
    assert found.y is None
    assert y.y is not None
    check_fp8(found.y8, y.y, state, scale, E4M3)
    state = scaling(scale)
    dy = residual * 1e-7
    dx, _ = layer_norm.backward(dy.float(), residual.float(), y.moments, weight)
    _, dx8 = layer_norm.backward(dy, residual, y.moments, weight, fp8=state)
    check_fp8(dx8, dx, state, scale, E5M2)


# GELU


def gelu_by_formula(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


@pytest.mark.parametrize("biased", [True, False])
def test_gelu_and_its_gradients(biased):
    x, bias, dy = wide(7, 12).requires_grad_(), wide(12, seed=1).requires_grad_(), wide(7, 12, seed=2)
    given = bias if biased else None
    y = gelu_by_formula(x + bias if biased else x)
    found = bias_gelu.forward_reference(x, given)
    assert_close(found.y, y.detach())
    assert found.y8 is None
    assert found.saved is x
    (dx,) = torch.autograd.grad(y, x, dy)
    back = bias_gelu.backward_reference(dy, x, given)
    assert_close(back.dx, dx)
    assert_close(back.bias, dx.sum(0))
    assert back.dx8 is None


@pytest.mark.parametrize("scale", [0.0, 11.0])
def test_gelu_in_fp8_rounds_once_and_saves_the_sum(scale):
    x, bias, dy = normal(70, 48), normal(48, seed=1), normal(70, 48, seed=2) * 1e-7
    state, saved_state = scaling(scale), scaling(scale)
    found = bias_gelu.forward_reference(x, bias, fp8=state, save_fp8=saved_state)
    assert found.y is None
    z = x.float() + bias.float()
    check_fp8(found.y8, torch.nn.functional.gelu(z, approximate="tanh"), state, scale, E4M3)
    assert isinstance(found.saved, Fp8Tensor)
    check_fp8(found.saved, z, saved_state, scale, E4M3)
    state = scaling(scale)
    kept = widen_fp8(found.saved, torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(gelu_by_formula(kept), kept, dy.double())
    for gradients, d_bias in (
        (bias_gelu.backward_reference(dy, found.saved, bias), dx.sum(0)),
        (bias_gelu.backward_reference(dy, found.saved, None, fp8=state), dx.sum(0)),
    ):
        torch.testing.assert_close(gradients.bias.double(), d_bias, rtol=1e-5, atol=1e-12)
    exact = bias_gelu.backward_reference(dy.float(), found.saved, bias).dx
    torch.testing.assert_close(exact.double(), dx, rtol=1e-5, atol=1e-13)
    assert gradients.dx is None
    check_fp8(gradients.dx8, exact, state, scale, E5M2)


def test_frozen_scales_of_gelu_and_layer_norm_stay():
    x, bias, states = normal(70, 48), normal(48, seed=1), [scaling(3.0) for _ in range(5)]
    activated = bias_gelu.forward_reference(x, bias, fp8=states[0], save_fp8=states[1], frozen_scales=True)
    bias_gelu.backward_reference(x, activated.saved, bias, fp8=states[2], frozen_scales=True)
    normed = layer_norm.forward(x, None, bias, 1e-5, bias, fp8=states[3], frozen_scales=True)
    layer_norm.backward(x, normed.residual, normed.moments, bias, fp8=states[4], frozen_scales=True)
    assert [state.scale.item() for state in states] == [3.0] * 5


# The gradient of query, key and value


@pytest.mark.parametrize("packed", [True, False])
def test_gradient_of_a_product_by_heads(packed):
    qkv, bias = wide(5, 24).requires_grad_(), wide(24, seed=1).requires_grad_()
    views = (qkv + bias).view(5, 2, 3, 4).unbind(2)
    whole = wide(5, 2, 3, 4, seed=2)
    given = whole.unbind(2) if packed else tuple(x.contiguous() for x in whole.unbind(2))
    d_qkv, d_bias = torch.autograd.grad(views, [qkv, bias], given)
    found = qkv_gradient.join_reference(*given)
    assert_close(found.d_qkv, d_qkv)
    assert_close(found.bias, d_bias)
    assert (found.d_qkv.data_ptr() == whole.data_ptr()) == packed
    assert qkv_gradient.join_reference(*given, half=False).d_qkv is None


def test_views_that_are_not_of_one_product_are_put_together():
    whole = wide(5, 2, 3, 4)
    q, k, v = whole.unbind(2)
    for given in ((k, q, v), (q, k, v.clone()), (q[:, :1], k[:, :1], v[:, :1])):
        assert qkv_gradient.joined(*given) is None
        found = qkv_gradient.join_reference(*given).d_qkv
        assert found is not None
        assert torch.equal(found, torch.stack(given, 2).flatten(1))
    later = qkv_gradient.joined(q[1:], k[1:], v[1:])
    assert later is not None
    assert torch.equal(later, whole[1:].flatten(1))


@pytest.mark.parametrize("scale", [0.0, 11.0])
def test_gradient_of_a_product_by_heads_in_fp8(scale):
    whole, state = normal(70, 2, 3, 4) * 1e-7, scaling(scale)
    found = qkv_gradient.join_reference(*whole.unbind(2), half=False, fp8=state, transpose=True)
    check_fp8(found.d_qkv8, whole.flatten(1), state, scale, E5M2)
    assert found.d_qkv8.transposed.is_contiguous()
    assert torch.equal(found.d_qkv8.transposed.view(torch.uint8), found.d_qkv8.data.view(torch.uint8).t())
