"""The Triton operations of a transformer that write FP8 against the references in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fp8_oracle import assert_same_fp8
from torch import Tensor

from common.ops.attention import triton as attention_triton
from common.ops.attention.reference import attention_reference
from common.ops.bias_gelu import triton as bias_gelu_triton
from common.ops.bias_gelu.reference import bias_gelu_reference
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout_add_norm import triton as dropout_add_norm_triton
from common.ops.dropout_add_norm.reference import dropout_add_norm_reference
from common.ops.fp8_cast.reference import E4M3, Fp8Tensor, Handover, Scaling, computed_reference
from common.ops.fp8_cast.triton import Tile

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SCALES = pytest.mark.parametrize("scale", [0.0, 3.7], ids=["first use", "later use"])
SEED = torch.tensor(-0x0123456789ABCDEF)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, several tiles for each, some of them cut off."""
    for key in bias_gelu_triton.FP8_TILES:
        monkeypatch.setitem(bias_gelu_triton.FP8_TILES, key, Tile(32, 64, 4, 4, 1))
    for key in ("forward to fp8", "backward to fp8"):
        monkeypatch.setitem(dropout_add_norm_triton.TILES, key, dropout_add_norm_triton.Tile(16, 4, 3))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scaling(scale: float) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def assert_close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[found.dtype], f"relative error {error:.2e}"


def fp8_of(y: Tensor | Fp8Tensor) -> Fp8Tensor:
    assert isinstance(y, Fp8Tensor)
    return y


# GELU


def gelu(
    function: Callable[..., Any], x: Tensor, bias: Tensor, dy: Tensor, states: tuple[Scaling, Scaling]
) -> tuple[Fp8Tensor, Fp8Tensor | None, Tensor | None]:
    """The result and the gradient of x in FP8, and that of the bias."""
    x, bias, handover = x.clone().requires_grad_(), bias.clone().requires_grad_(), Handover(states[1])
    y8 = fp8_of(function(x, bias, fp8=states[0], handover=handover))
    y8.source.backward(dy)
    assert x.grad is not None
    return y8, handover.take(), bias.grad


@DTYPES
@SCALES
@pytest.mark.parametrize("shape", [(16, 16), (80, 208)])
def test_gelu_and_its_gradient_in_fp8_equal_plain(shape: tuple[int, int], scale: float, dtype: torch.dtype) -> None:
    given = (
        random(*shape, dtype=dtype) * 3,
        random(shape[1], seed=1, dtype=dtype),
        random(*shape, seed=2, dtype=dtype),
    )
    ours, plain = ((scaling(scale), scaling(100 * scale)) for _ in range(2))
    y8, dx8, d_bias = gelu(bias_gelu_triton.bias_gelu, *given, ours)
    expected_y8, expected_dx8, expected_d_bias = gelu(bias_gelu_reference, *(x.double() for x in given), plain)
    assert_same_fp8(y8, ours[0], expected_y8, plain[0], dtype)
    assert_same_fp8(dx8, ours[1], expected_dx8, plain[1], dtype)
    assert_close(d_bias, expected_d_bias)


def test_gelu_in_fp8_with_a_gradient_in_16_bits() -> None:
    x, bias, dy = random(48, 64) * 3, random(64, seed=1), random(48, 64, seed=2)
    leaves = [(x.clone().requires_grad_(), bias.clone().requires_grad_()) for _ in range(2)]
    fp8_of(bias_gelu_triton.bias_gelu(*leaves[0], fp8=scaling(2.0))).source.backward(dy)
    bias_gelu_triton.bias_gelu(*leaves[1]).backward(dy)
    for found, expected in zip(*leaves, strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_of_gelu_that_is_not_finite_leaves_the_scale(value: float) -> None:
    x, bias, dy = random(48, 64), random(64, seed=1), random(48, 64, seed=2)
    dy[40, 3] = value
    states = (scaling(2.0), scaling(5.0))
    _, dx8, d_bias = gelu(bias_gelu_triton.bias_gelu, x, bias, dy, states)
    expected = torch.zeros(48, 64, dtype=torch.bool)
    expected[40, 3] = True
    assert dx8 is not None
    assert d_bias is not None
    assert torch.equal(dx8.data.float().isnan(), expected)
    assert not d_bias[3].isfinite()
    assert states[1].scale == 5.0


# Dropout, residual and norm


def norm(
    function: Callable[..., Any], inputs: dict[str, Tensor | None], dys: list[Tensor], states: tuple[Scaling, Scaling]
) -> tuple[Fp8Tensor, Tensor, Fp8Tensor | None, dict[str, Tensor | None]]:
    """The result in FP8 and in 16 bits, the gradient of x in FP8, and the gradients of the others."""
    leaves = {name: None if given is None else given.clone().requires_grad_() for name, given in inputs.items()}
    handover, twice = Handover(states[1]), len(dys) == 2
    mask = DropoutMask(0.1, SEED, 6)
    results = function(*leaves.values(), 1e-12, mask, twice=twice, fp8=states[0], handover=handover)
    first, *second = results if twice else (results,)
    y8 = fp8_of(first)
    torch.autograd.backward([y8.source, *second], dys)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None and name != "x"}
    return y8, y8.source.detach(), handover.take(), gradients


@DTYPES
@SCALES
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("absent", [(), ("bias", "residual")], ids=["all", "neither bias nor residual"])
def test_norm_and_its_gradient_in_fp8_equal_plain(
    absent: tuple[str, ...], readers: int, scale: float, dtype: torch.dtype
) -> None:
    inputs: dict[str, Tensor | None] = {
        "x": random(80, 48, dtype=dtype),
        "bias": random(48, seed=1, dtype=dtype),
        "residual": random(80, 48, seed=2, dtype=dtype) + 2,
        "weight": random(48, seed=3, dtype=dtype),
        "norm_bias": random(48, seed=4, dtype=dtype),
    }
    inputs |= dict.fromkeys(absent)
    dys = [random(80, 48, seed=5 + reader, dtype=dtype) for reader in range(readers)]
    wide = {name: None if given is None else given.double() for name, given in inputs.items()}
    ours, plain = ((scaling(scale), scaling(100 * scale)) for _ in range(2))
    y8, y, dx8, gradients = norm(dropout_add_norm_triton.dropout_add_norm, inputs, dys, ours)
    expected = norm(dropout_add_norm_reference, wide, [dy.double() for dy in dys], plain)
    assert_same_fp8(dx8, ours[1], expected[2], plain[1], dtype)
    assert_close(y, expected[1])
    for name, gradient in expected[3].items():
        assert_close(gradients[name], gradient)
    again = scaling(scale)  # FP8 is that of the 16-bit result itself
    assert_same_fp8(y8, ours[0], computed_reference(y.float(), again, E4M3, dtype), again, dtype)
    assert torch.equal(y8.data.float(), computed_reference(y.float(), scaling(scale), E4M3, dtype).data.float())


def test_norm_in_fp8_with_a_gradient_in_16_bits() -> None:
    given = [random(48, 64, seed=seed) for seed in (0, 1)] + [random(64, seed=seed) for seed in (2, 3)]
    mask, both = DropoutMask(0.1, SEED, 6), []
    for fp8 in (scaling(2.0), None):
        x, residual, weight, bias = (tensor.clone().requires_grad_() for tensor in given)
        y = dropout_add_norm_triton.dropout_add_norm(x, None, residual, weight, bias, 1e-12, mask, fp8=fp8)
        source = y.source if isinstance(y, Fp8Tensor) else y
        assert isinstance(source, Tensor)
        source.backward(random(48, 64, seed=9))
        both.append([source, x.grad, residual.grad, weight.grad, bias.grad])
    for found, expected in zip(*both, strict=True):
        assert torch.equal(found, expected)


# Attention


def attention_gradient(
    function: Callable[..., Any], qkv: Tensor, bias: Tensor, d_context: Tensor, state: Scaling
) -> tuple[Fp8Tensor, Tensor | None]:
    """The gradient of qkv in FP8 and that of the bias, of two sequences with room around them."""
    starts, lengths = torch.tensor([3, 75, 0]), torch.tensor([70, 9, 0])
    qkv, bias, handover = qkv.clone().requires_grad_(), bias.clone().requires_grad_(), Handover(state)
    context = function(qkv, starts, lengths, 80, DropoutMask(0.1, SEED, 4), bias, handover=handover)
    context.backward(d_context)
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape
    taken = handover.take()
    assert taken is not None
    return taken, bias.grad


@SCALES
def test_the_gradient_of_attention_in_fp8_equals_plain(scale: float) -> None:
    """In fp32: of 16-bit factors' products, small differences would be compared."""
    shape = (96, 3, 2, 32)
    qkv, bias = random(*shape, dtype=torch.float32), random(192, seed=1, dtype=torch.float32)
    d_context = random(96, 2, 32, seed=2, dtype=torch.float32) * 1e-3
    outside = torch.ones(96, dtype=torch.bool)
    outside[3:73] = outside[75:84] = False
    qkv[outside], d_context[outside] = 0.0, 0.0
    plain, ours = scaling(1e5 * scale), scaling(1e5 * scale)
    expected, expected_d_bias = attention_gradient(
        attention_reference, qkv.double(), bias.double(), d_context.double(), plain
    )
    qkv[outside], d_context[outside] = float("nan"), float("nan")
    found, d_bias = attention_gradient(attention_triton.attention, qkv, bias, d_context, ours)
    assert_same_fp8(found, ours, expected, plain, torch.float32)
    assert found.data[outside].float().eq(0).all()
    assert found.data[~outside].float().ne(0).float().mean() > 0.99  # the first scale leaves it a number
    assert d_bias is not None
    assert expected_d_bias is not None
    assert (d_bias.double() - expected_d_bias).norm() < 1e-5 * expected_d_bias.norm()


def test_a_gradient_of_attention_that_is_not_finite_leaves_the_scale(bfloat16_products: None) -> None:
    d_context, state = random(96, 2, 32, seed=2), scaling(3.0)
    d_context[80, 1, 5] = float("inf")
    found, _ = attention_gradient(attention_triton.attention, random(96, 3, 2, 32), random(192), d_context, state)
    assert found.data[76:84].float().isnan().any()
    assert not found.data[:74].float().isnan().any()
    assert state.scale == 3.0
    assert not state.pending.any()
