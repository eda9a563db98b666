"""The Triton operations between GPT-3's products against the references; run by tests/test_interpreted_kernels.py.

16-bit and fp32 results are compared with the references in float64, FP8 with the reference in the same dtype:
a sum in another order moves a value over the middle between two codes now and then, so that a few bytes differ by one.
Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here.
"""

from __future__ import annotations

import pytest
import torch
from tests.fp8_oracle import assert_same_fp8, codes
from torch import Tensor

from common.ops.bias_gelu import reference as gelu_plain
from common.ops.bias_gelu import triton as gelu_triton
from common.ops.fp8_cast import triton as cast_triton
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling
from common.ops.layer_norm_1p import reference as norm_plain
from common.ops.layer_norm_1p import triton as norm_triton
from common.ops.norm.parted_rows import parts_of
from common.ops.qkv_gradient import reference as qkv_plain
from common.ops.qkv_gradient import triton as qkv_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("scale", [0.0, 3.7], ids=["first use", "later use"])
FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["delayed", "frozen"])


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few programs and several tiles for each, since every step of the interpreter takes its time."""
    for key in gelu_triton.TILES:
        monkeypatch.setitem(gelu_triton.TILES, key, gelu_triton.Tile(16, 128, 4, 3))
    for key in gelu_triton.FP8_TILES:
        monkeypatch.setitem(gelu_triton.FP8_TILES, key, cast_triton.Tile(16, 128, 4, 3, 1))
    monkeypatch.setitem(qkv_triton.TILES, "join", qkv_triton.Tile(16, 4, 12, 1))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def double(*given: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in given]


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


# LayerNorm

SHAPES = [(13, 96, 3), (5, 1, 1), (3, 250, 1), (2, 580, 5), (70, 24, 3)]
PARTS = ("tokens", "features", "parts")
"""Several rows a program, one feature, air behind the last part of one and of several, several groups of rows."""


def norm_inputs(tokens: int, features: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Residual, delta, what is added to every row, weight, bias; the residual's mean is far from zero."""
    return (
        random(tokens, features, dtype=dtype) * 3 + 5,
        random(tokens, features, seed=1, dtype=dtype),
        random(features, seed=2, dtype=dtype),
        random(features, seed=3, dtype=dtype) / 4,
        random(features, seed=4, dtype=dtype),
    )


@DTYPES
@pytest.mark.parametrize(PARTS, SHAPES)
@pytest.mark.parametrize("added_up", [True, False])
def test_norm_equals_plain(added_up: bool, tokens: int, features: int, parts: int, dtype: torch.dtype) -> None:
    assert parts_of(features).number == parts
    residual, delta, added, weight, bias = norm_inputs(tokens, features, dtype)
    total = (residual.float() + delta.float() + added.float()).to(dtype) if added_up else residual
    found = norm_triton.forward(residual, *((delta, added) if added_up else (None, None)), weight, bias, 1e-5)
    assert (found.residual - total).abs().max() <= 2 * torch.finfo(dtype).eps * total.abs().max()
    assert (found.residual is residual) == (not added_up)
    expected = norm_plain.forward_reference(found.residual.double(), None, None, weight.double(), bias.double(), 1e-5)
    assert_close(found.moments, expected.moments, torch.float32)
    assert_close(found.y, expected.y, dtype)
    assert found.y8 is None
    again = norm_triton.recompute(found.residual, found.moments, weight, bias)
    assert_close(again, expected.y, dtype)


@SCALES
@FROZEN
@pytest.mark.parametrize(("features", "half"), [(96, False), (200, True)])
def test_norm_writes_fp8(features: int, half: bool, frozen: bool, scale: float) -> None:
    residual, delta, added, weight, bias = norm_inputs(70, features, torch.bfloat16)
    given = (residual, delta, None if half else added, weight, bias)
    ours, plain = scaling(scale), scaling(scale)
    options = {"half": half, "frozen_scales": frozen}
    found = norm_triton.forward(*given, 1e-5, fp8=ours, **options)
    expected = norm_plain.forward_reference(*given, 1e-5, fp8=plain, **options)
    assert_same_fp8(found.y8, ours, expected.y8, plain, torch.bfloat16)
    assert (ours.scale == scale) == frozen
    assert (found.y is not None) == half


def test_norm_of_missing_rows_without_epsilon_leaves_a_scale() -> None:
    """Rows of the sample beyond the last one, to which a bias is added, have no variance."""
    ours = scaling()
    given = (random(3, 8, dtype=torch.bfloat16), None, torch.full((8,), 7.0), torch.zeros(8), torch.zeros(8))
    norm_triton.forward(*given, 0.0, fp8=ours)
    assert 448 / 3 < ours.scale < 448


@DTYPES
@pytest.mark.parametrize(PARTS, [shape for shape in SHAPES if shape[1] > 1])
@pytest.mark.parametrize("other", [True, False])
def test_gradients_of_the_norm_equal_plain(
    other: bool, tokens: int, features: int, parts: int, dtype: torch.dtype
) -> None:
    residual, dy, _, weight, _ = norm_inputs(tokens, features, dtype)
    d_residual = random(tokens, features, seed=5, dtype=dtype) if other else None
    moments = norm_plain.forward_reference(residual, None, None, weight, weight, 1e-5).moments
    found, none = norm_triton.backward(dy, residual, moments, weight, d_residual)
    wide = double(dy, residual, moments, weight, d_residual)
    assert_close(found, norm_plain.backward_reference(*wide)[0], dtype)
    assert none is None
    sums = norm_triton.parameter_gradients(dy, residual, moments, found if other else None)
    expected = norm_plain.parameter_gradients_reference(*double(dy, residual, moments, found if other else None))
    for name in ("weight", "bias", "added"):
        ours, plain = getattr(sums, name), getattr(expected, name)
        if name == "added" and not other:
            assert ours is plain is None
            continue
        assert ours.dtype == torch.float32
        assert (ours.double() - plain).norm() < 1e-5 * plain.norm() + 1e-4


@SCALES
@pytest.mark.parametrize(("features", "frozen"), [(96, False), (200, True)])
def test_gradient_of_the_norm_in_fp8(features: int, frozen: bool, scale: float) -> None:
    residual, dy, _, weight, _ = norm_inputs(70, features, torch.bfloat16)
    dy, d_residual = dy * 1e-7, random(70, features, seed=5, dtype=torch.bfloat16) * 1e-7
    moments = norm_plain.forward_reference(residual, None, None, weight, weight, 1e-5).moments
    ours, plain = scaling(scale * 1e9), scaling(scale * 1e9)
    given = (dy, residual, moments, weight, d_residual)
    dx, found = norm_triton.backward(*given, fp8=ours, frozen_scales=frozen)
    expected_dx, expected = norm_plain.backward_reference(*given, fp8=plain, frozen_scales=frozen)
    assert_same_fp8(found, ours, expected, plain, torch.bfloat16)
    assert_close(dx, expected_dx.double(), torch.bfloat16)
    assert codes(found).count_nonzero() > 0.99 * dy.numel()


def test_norm_refuses_what_it_would_misread() -> None:
    zeros = torch.zeros(8)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        norm_triton.forward(random(8, 6).t(), None, None, zeros, zeros, 1e-5)
    with pytest.raises(ValueError, match="added must be contiguous"):
        norm_triton.forward(random(6, 8), None, torch.zeros(16)[::2], zeros, zeros, 1e-5)


# GELU


def gelu_inputs(tokens: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The product, its bias, and the result's gradient."""
    return (
        random(tokens, features, dtype=dtype) * 2,
        random(features, seed=1, dtype=dtype),
        random(tokens, features, seed=2, dtype=dtype),
    )


@DTYPES
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (37, 200)])
def test_gelu_equals_plain(shape: tuple[int, int], biased: bool, dtype: torch.dtype) -> None:
    x, bias, dy = gelu_inputs(*shape, dtype)
    given = bias if biased else None
    found = gelu_triton.forward(x, given)
    (wide_x, wide_bias, wide_dy) = double(x, given, dy)
    assert_close(found.y, gelu_plain.forward_reference(wide_x, wide_bias).y, dtype)
    assert found.y8 is None
    assert found.saved is x
    back = gelu_triton.backward(dy, x, given)
    expected = gelu_plain.backward_reference(wide_dy, wide_x, wide_bias)
    assert_close(back.dx, expected.dx, dtype)
    assert_close(back.bias, expected.bias, torch.float32)
    assert back.dx8 is None


@FROZEN
@pytest.mark.parametrize(
    ("scale", "saved_scale", "biased"),
    [(0.0, 0.0, True), (2.1, 0.0, False), (0.0, 3.7, True), (2.1, None, True), (None, 0.0, False)],
)
def test_gelu_writes_fp8_and_saves_it(
    scale: float | None, saved_scale: float | None, biased: bool, frozen: bool
) -> None:
    x, bias, _ = gelu_inputs(40, 200, torch.bfloat16)
    x[-1, 7] = 100
    results = []
    for function in (gelu_triton.forward, gelu_plain.forward_reference):
        states = [None if each is None else scaling(each) for each in (scale, saved_scale)]
        given = {"fp8": states[0], "save_fp8": states[1], "frozen_scales": frozen}
        results.append((function(x, bias if biased else None, **given), *states))
    (found, ours, our_saved), (expected, plain, plain_saved) = results
    if scale is None:
        assert found.y8 is None
        assert_close(found.y, expected.y.double(), torch.bfloat16)
    else:
        assert found.y is expected.y is None
        assert_same_fp8(found.y8, ours, expected.y8, plain, torch.bfloat16)
        assert (ours.scale == scale) == frozen
    if saved_scale is None:
        assert found.saved is x
    else:
        assert torch.equal(codes(found.saved), codes(expected.saved))
        assert_same_fp8(found.saved, our_saved, expected.saved, plain_saved, torch.bfloat16)
        assert (our_saved.scale == saved_scale) == frozen


@FROZEN
@pytest.mark.parametrize("saved_in_fp8", [False, True])
@pytest.mark.parametrize("scale", [0.0, 3e8, None], ids=["first use", "later use", "half"])
def test_gradient_of_gelu_with_fp8(scale: float | None, saved_in_fp8: bool, frozen: bool) -> None:
    x, bias, dy = gelu_inputs(40, 200, torch.bfloat16)
    dy *= 1e-6
    saved = gelu_plain.forward_reference(x, bias, save_fp8=scaling(20.0) if saved_in_fp8 else None).saved
    assert isinstance(saved, Fp8Tensor) == saved_in_fp8
    if scale is None:
        found = gelu_triton.backward(dy, saved, bias)
        expected = gelu_plain.backward_reference(dy.double(), saved if saved_in_fp8 else x.double(), bias.double())
        assert_close(found.dx, expected.dx, torch.bfloat16)
    else:
        ours, plain = scaling(scale), scaling(scale)
        found = gelu_triton.backward(dy, saved, bias, fp8=ours, frozen_scales=frozen)
        expected = gelu_plain.backward_reference(dy, saved, bias, fp8=plain, frozen_scales=frozen)
        assert found.dx is expected.dx is None
        assert_same_fp8(found.dx8, ours, expected.dx8, plain, torch.bfloat16)
        assert (ours.scale == scale) == frozen
    assert found.bias.dtype == torch.float32
    assert (found.bias.double() - expected.bias).norm() < 1e-5 * expected.bias.norm()


def test_gelu_of_large_values_is_finite() -> None:
    x = torch.tensor([[-1e4, -90.0, 90.0, 1e4]])
    assert gelu_triton.forward(x, None).y.tolist() == [[0.0, 0.0, 90.0, 1e4]]
    assert gelu_triton.backward(torch.ones(1, 4), x, None).dx.tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_gelu_refuses_what_it_would_misread() -> None:
    with pytest.raises(ValueError, match="x must be contiguous"):
        gelu_triton.forward(random(8, 6).t(), None)


# The gradient of query, key and value


def parts(
    tokens: int, heads: int, size: int, dtype: torch.dtype, packed: bool, factor: float = 1.0
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value: views of one tensor, or of three that differ in their strides."""
    whole = random(tokens, heads, 3, size, dtype=dtype) * factor
    q, k, v = whole.unbind(2)
    return (q, k, v) if packed else (q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1), v)


@DTYPES
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(50, 2, 16), (5, 1, 6)])
def test_gradient_of_qkv_equals_plain(
    tokens: int, heads: int, size: int, half: bool, packed: bool, dtype: torch.dtype
) -> None:
    given = parts(tokens, heads, size, dtype, packed)
    found = qkv_triton.join(*given, half=half)
    expected = torch.stack([x.contiguous() for x in given], 2).flatten(1)
    assert found.d_qkv8 is None
    assert (found.d_qkv is not None) == half
    if half:
        assert torch.equal(found.d_qkv, expected)
        assert (found.d_qkv.data_ptr() == given[0].data_ptr()) == packed
    assert_close(found.bias, expected.double().sum(0), torch.float32)


@SCALES
@FROZEN
@pytest.mark.parametrize(("packed", "transpose"), [(True, True), (False, True), (False, False)])
def test_gradient_of_qkv_in_fp8(packed: bool, transpose: bool, frozen: bool, scale: float) -> None:
    given = parts(50, 2, 16, torch.bfloat16, packed, 1e-6)
    ours, plain = scaling(scale * 1e8), scaling(scale * 1e8)
    options = {"half": False, "transpose": transpose, "frozen_scales": frozen}
    found = qkv_triton.join(*given, fp8=ours, **options)
    expected = qkv_plain.join_reference(*given, fp8=plain, **options)
    assert_same_fp8(found.d_qkv8, ours, expected.d_qkv8, plain, torch.bfloat16)
    assert torch.equal(codes(found.d_qkv8), codes(expected.d_qkv8))
    assert (found.d_qkv8.transposed is not None) == transpose
    assert ours.scale == plain.scale
    assert (ours.scale == scaling(scale * 1e8).scale) == frozen
    assert (found.bias - expected.bias).norm() < 1e-5 * expected.bias.norm()


def test_gradient_of_qkv_refuses_what_it_would_misread() -> None:
    with pytest.raises(ValueError, match="must be dense"):
        qkv_triton.join(random(4, 2, 6)[:, :, ::2], random(4, 2, 3), random(4, 2, 3))
    with pytest.raises(ValueError, match=r"\(T, H, D\) each"):
        qkv_triton.join(random(4, 2, 3), random(4, 1, 3), random(4, 1, 3))
