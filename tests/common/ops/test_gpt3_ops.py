"""The plain operations between GPT-3's products against autograd over formulas written out here, and against FP8's
definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.ops import bias_gelu, qkv_gradient
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling, widen_fp8
from common.ops.operation import OperationRequest
from common.ops.row_norm import LAYER_NORM_1P as LAYER_NORM
from tests.fp8_oracle import E4M3, E5M2, check_fp8

layer_norm = LAYER_NORM.reference


def wide(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def half(*shape: int, seed: int = 0) -> Tensor:
    return wide(*shape, seed=seed).to(torch.bfloat16)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# LayerNorm


def norm_by_formula(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + epsilon) * (1 + weight) + bias


@pytest.mark.parametrize("given", ["both", "delta", "bias", "neither"])
def test_norm_and_its_gradients(given: str) -> None:
    residual, weight, bias = (wide(*shape, seed=seed) for seed, shape in enumerate(((5, 12), (12,), (12,))))
    delta = wide(5, 12, seed=3).requires_grad_() if given in ("both", "delta") else None
    added = wide(12, seed=4).requires_grad_() if given in ("both", "bias") else None
    leaves = [x.requires_grad_() for x in (residual, weight, bias)]
    x = residual
    for each in (delta, added):
        x = x if each is None else x + each
    y = norm_by_formula(x, weight, bias, 0.01)
    found = layer_norm.forward(residual, delta, weight, 0.01, bias, added)
    close(found.y, y.detach())
    close(found.residual, x.detach())
    assert (found.residual is residual) == (given == "neither")
    close(layer_norm.recompute(found.residual, found.moments, weight, bias), y.detach())

    dy, d_residual = wide(5, 12, seed=5), wide(5, 12, seed=6)
    alone = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    dx, none = layer_norm.backward(dy, found.residual, found.moments, weight)
    close(dx, alone[0])
    assert none is None
    total = (y * dy).sum() + (x * d_residual).sum()
    d_leaf, *of_added = torch.autograd.grad(total, [residual, *([] if added is None else [added])])
    dx, _ = layer_norm.backward(dy, found.residual, found.moments, weight, d_residual)
    close(dx, d_leaf)
    sums = layer_norm.parameter_gradients(dy, found.residual, found.moments, None if added is None else dx)
    for each, expected in zip(sums, [*alone[1:], *of_added], strict=True):
        close(each, expected)


def test_norm_adds_up_in_single_precision_and_rounds_once() -> None:
    residual, delta, added = half(5, 12), half(5, 12, seed=1), half(12, seed=2)
    weight, bias = half(12, seed=3), half(12, seed=4)
    found = layer_norm.forward(residual, delta, weight, 1e-5, bias, added)
    assert torch.equal(found.residual, (residual.double() + delta.double() + added.double()).bfloat16())
    assert found.moments.dtype == torch.float32
    assert found.y is not None
    expected = norm_by_formula(found.residual.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(found.y.double(), expected, rtol=2.0**-8, atol=1e-5)


def test_weights_of_zero_leave_a_normalised_row() -> None:
    y = layer_norm.forward(wide(3, 64) * 4 + 9, None, torch.zeros(64), 0.0, torch.zeros(64)).y
    assert y is not None
    close(y.mean(1), torch.zeros(3, dtype=torch.float64))
    close(y.square().mean(1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.0, 11.0])
def test_norm_in_fp8_rounds_once(scale: float) -> None:
    """What is written in 16 bits otherwise comes into FP8 from the arithmetic's own precision."""
    residual, weight, bias = half(70, 48), half(48, seed=1).float(), half(48, seed=2).float()
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


def test_norm_of_rows_that_no_program_holds_is_left_to_another() -> None:
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, {"features": 20_000})
    assert "features is at most 16384, not 20000" in str(LAYER_NORM.unsupported("triton", request))


# GELU


def gelu_by_formula(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


@pytest.mark.parametrize("biased", [True, False])
def test_gelu_and_its_gradients(biased: bool) -> None:
    x, bias, dy = wide(7, 12).requires_grad_(), wide(12, seed=1).requires_grad_(), wide(7, 12, seed=2)
    given = bias if biased else None
    y = gelu_by_formula(x + bias if biased else x)
    found = bias_gelu.forward_reference(x, given)
    close(found.y, y.detach())
    assert found.y8 is None
    assert found.saved is x
    (dx,) = torch.autograd.grad(y, x, dy)
    back = bias_gelu.backward_reference(dy, x, given)
    close(back.dx, dx)
    close(back.bias, dx.sum(0))
    assert back.dx8 is None


@pytest.mark.parametrize("scale", [0.0, 11.0])
def test_gelu_in_fp8_rounds_once_and_saves_the_sum(scale: float) -> None:
    x, bias, dy = half(70, 48), half(48, seed=1), half(70, 48, seed=2) * 1e-7
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
    assert exact is not None
    torch.testing.assert_close(exact.double(), dx, rtol=1e-5, atol=1e-13)
    assert gradients.dx is None
    check_fp8(gradients.dx8, exact, state, scale, E5M2)


def test_frozen_scales_stay() -> None:
    x, bias, states = half(70, 48), half(48, seed=1), [scaling(3.0) for _ in range(5)]
    activated = bias_gelu.forward_reference(x, bias, fp8=states[0], save_fp8=states[1], frozen_scales=True)
    bias_gelu.backward_reference(x, activated.saved, bias, fp8=states[2], frozen_scales=True)
    normed = layer_norm.forward(x, None, bias, 1e-5, bias, fp8=states[3], frozen_scales=True)
    layer_norm.backward(x, normed.residual, normed.moments, bias, fp8=states[4], frozen_scales=True)
    assert [state.scale.item() for state in states] == [3.0] * 5


# The gradient of query, key and value


@pytest.mark.parametrize("packed", [True, False])
def test_gradient_of_a_product_by_heads(packed: bool) -> None:
    qkv, bias = wide(5, 24).requires_grad_(), wide(24, seed=1).requires_grad_()
    views = (qkv + bias).view(5, 2, 3, 4).unbind(2)
    whole = wide(5, 2, 3, 4, seed=2)
    given = whole.unbind(2) if packed else tuple(x.contiguous() for x in whole.unbind(2))
    d_qkv, d_bias = torch.autograd.grad(views, [qkv, bias], given)
    found = qkv_gradient.join_reference(*given)
    close(found.d_qkv, d_qkv)
    close(found.bias, d_bias)
    assert found.d_qkv is not None
    assert (found.d_qkv.data_ptr() == whole.data_ptr()) == packed
    assert qkv_gradient.join_reference(*given, half=False).d_qkv is None


def test_views_that_are_not_of_one_product_are_put_together() -> None:
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
def test_gradient_of_a_product_by_heads_in_fp8(scale: float) -> None:
    whole, state = half(70, 2, 3, 4) * 1e-7, scaling(scale)
    found = qkv_gradient.join_reference(*whole.unbind(2), half=False, fp8=state, transpose=True)
    check_fp8(found.d_qkv8, whole.flatten(1), state, scale, E5M2)
    assert found.d_qkv8 is not None
    assert found.d_qkv8.transposed is not None
    assert found.d_qkv8.transposed.is_contiguous()
    assert torch.equal(found.d_qkv8.transposed.view(torch.uint8), found.d_qkv8.data.view(torch.uint8).t())
