"""The Triton operations of a decoder against the references; run by tests/test_interpreted_kernels.py.

16-bit and fp32 results are compared with the references in float64, FP8 with the reference in the same dtype:
a sum in another order moves a value over the middle between two codes now and then, so that a few bytes differ by one.
Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here.
"""

from __future__ import annotations

import pytest
import torch
from tests.fp8_oracle import assert_same_fp8, codes
from torch import Tensor

from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling
from common.ops.lora_input import reference as lora_plain
from common.ops.lora_input import triton as lora_triton
from common.ops.lora_input.reference import Region
from common.ops.rms_norm import reference as rms_norm_plain
from common.ops.rms_norm import triton as rms_norm_triton
from common.ops.rope import reference as rope_plain
from common.ops.rope import triton as rope_triton
from common.ops.swiglu import reference as swiglu_plain
from common.ops.swiglu import triton as swiglu_triton
from common.ops.transpose_fp8 import triton as transpose_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("scale", [0.0, 3.7], ids=["first use", "later use"])
FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["delayed", "frozen"])
SEED = torch.tensor(-0x0123456789ABCDEF)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few programs and several tiles for each, since every step of the interpreter takes its time."""
    for key in rope_triton.TILES:
        monkeypatch.setitem(rope_triton.TILES, key, rope_triton.Tile(32, 4, 3))
    for key in swiglu_triton.TILES:
        monkeypatch.setitem(swiglu_triton.TILES, key, swiglu_triton.Tile(16, 128, 4, 3, 1))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


# RMSNorm


def norm_inputs(tokens: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Residual, what is added to it, weight."""
    return (
        random(tokens, features, dtype=dtype) * 3,
        random(tokens, features, seed=1, dtype=dtype),
        (random(features, seed=2) + 1).to(dtype),
    )


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "features", "added"), [(13, 96, True), (5, 1, False), (3, 1000, True), (2, 9000, False)]
)
def test_norm_equals_plain(tokens: int, features: int, added: bool, dtype: torch.dtype) -> None:
    residual, delta, weight = norm_inputs(tokens, features, dtype)
    found = rms_norm_triton.forward(residual, delta if added else None, weight, 1e-5)
    total = (residual.float() + delta.float()).to(dtype) if added else residual
    expected = rms_norm_plain.forward_reference(total.double(), None, weight.double(), 1e-5)
    assert torch.equal(found.residual, total)
    assert (found.residual is residual) == (not added)
    assert_close(found.inverse_rms, expected.inverse_rms, torch.float32)
    assert_close(found.y, expected.y, dtype)
    assert found.y8 is None
    again = rms_norm_triton.recompute(found.residual, found.inverse_rms, weight)
    assert torch.equal(again, found.y)


@SCALES
@FROZEN
@pytest.mark.parametrize("half", [True, False])
def test_norm_writes_fp8(half: bool, frozen: bool, scale: float) -> None:
    residual, delta, weight = norm_inputs(70, 200, torch.bfloat16)
    ours, plain = scaling(scale), scaling(scale)
    given = {"half": half, "frozen_scales": frozen}
    found = rms_norm_triton.forward(residual, delta, weight, 1e-5, fp8=ours, **given)
    expected = rms_norm_plain.forward_reference(residual, delta, weight, 1e-5, fp8=plain, **given)
    assert_same_fp8(found.y8, ours, expected.y8, plain, torch.bfloat16)
    assert (ours.scale == scale) == frozen
    assert (found.y is not None) == half


def test_norm_of_zeros_without_epsilon_in_missing_rows_leaves_a_scale() -> None:
    """Rows of the sample beyond the last one have no root mean square."""
    ours = scaling()
    rms_norm_triton.forward(random(3, 8, dtype=torch.bfloat16), None, torch.ones(8), 0.0, fp8=ours)
    assert 448 / 3 < ours.scale < 448


@DTYPES
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize(("tokens", "features"), [(13, 96), (2, 9000)])
def test_gradient_of_the_norm_equals_plain(tokens: int, features: int, other: bool, dtype: torch.dtype) -> None:
    residual, dy, weight = norm_inputs(tokens, features, dtype)
    d_residual = random(tokens, features, seed=3, dtype=dtype) if other else None
    inverse_rms = rms_norm_plain.forward_reference(residual, None, weight, 1e-5).inverse_rms
    found, none = rms_norm_triton.backward(dy, residual, inverse_rms, weight, d_residual)
    expected, _ = rms_norm_plain.backward_reference(
        dy.double(), residual.double(), inverse_rms.double(), weight.double(), wide(d_residual)
    )
    assert_close(found, expected, dtype)
    assert none is None
    of_weight = rms_norm_triton.weight_gradient(dy, residual, inverse_rms)
    sums = rms_norm_plain.weight_gradient_reference(dy.double(), residual.double(), inverse_rms.double())
    assert of_weight.dtype == torch.float32
    assert_close(of_weight, sums, torch.float32)


@SCALES
@FROZEN
def test_gradient_of_the_norm_in_fp8(frozen: bool, scale: float) -> None:
    residual, dy, weight = norm_inputs(70, 200, torch.bfloat16)
    dy, d_residual = dy * 1e-7, random(70, 200, seed=3, dtype=torch.bfloat16) * 1e-7
    inverse_rms = rms_norm_plain.forward_reference(residual, None, weight, 1e-5).inverse_rms
    ours, plain = scaling(scale * 1e9), scaling(scale * 1e9)
    given = (dy, residual, inverse_rms, weight, d_residual)
    _, found = rms_norm_triton.backward(*given, fp8=ours, frozen_scales=frozen)
    _, expected = rms_norm_plain.backward_reference(*given, fp8=plain, frozen_scales=frozen)
    assert_same_fp8(found, ours, expected, plain, torch.bfloat16)
    assert codes(found).count_nonzero() > 0.99 * dy.numel()


def test_norm_refuses_what_it_would_misread() -> None:
    with pytest.raises(ValueError, match="residual must be contiguous"):
        rms_norm_triton.forward(random(8, 6).t(), None, torch.ones(8), 1e-5)


# SwiGLU


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (37, 200), (9, 1030)])
def test_swiglu_equals_plain(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up, dy = random(shape[0], 2 * shape[1], dtype=dtype) * 3, random(*shape, seed=1, dtype=dtype)
    found = swiglu_triton.forward(gate_up)
    assert_close(found.y, swiglu_plain.forward_reference(gate_up.double()).y, dtype)
    assert found.y8 is None
    assert found.saved is gate_up
    d_gate_up, none = swiglu_triton.backward(dy, gate_up)
    assert_close(d_gate_up, swiglu_plain.backward_reference(dy.double(), gate_up.double())[0], dtype)
    assert none is None


@FROZEN
@pytest.mark.parametrize(("scale", "saved_scale"), [(0.0, 0.0), (2.1, 0.0), (0.0, 3.7)])
def test_swiglu_writes_fp8_and_saves_it(scale: float, saved_scale: float, frozen: bool) -> None:
    gate_up = random(40, 280, dtype=torch.bfloat16) * 3
    gate_up[-1, 7] = 100
    ours, plain = scaling(scale), scaling(scale)
    our_saved, plain_saved = scaling(saved_scale), scaling(saved_scale)
    found = swiglu_triton.forward(gate_up, fp8=ours, save_fp8=our_saved, frozen_scales=frozen)
    expected = swiglu_plain.forward_reference(gate_up, fp8=plain, save_fp8=plain_saved, frozen_scales=frozen)
    assert found.y is expected.y is None
    assert_same_fp8(found.y8, ours, expected.y8, plain, torch.bfloat16)
    assert isinstance(found.saved, Fp8Tensor)
    assert isinstance(expected.saved, Fp8Tensor)
    assert torch.equal(codes(found.saved), codes(expected.saved))
    assert_same_fp8(found.saved, our_saved, expected.saved, plain_saved, torch.bfloat16)
    assert (ours.scale == scale) == (our_saved.scale == saved_scale) == frozen


@pytest.mark.parametrize("saved_in_fp8", [False, True])
@pytest.mark.parametrize("scale", [0.0, 3e8, None], ids=["first use", "later use", "half"])
def test_gradient_of_swiglu_with_fp8(scale: float | None, saved_in_fp8: bool) -> None:
    gate_up, dy = random(40, 280, dtype=torch.bfloat16) * 3, random(40, 140, seed=1, dtype=torch.bfloat16) * 1e-6
    saved = swiglu_plain.forward_reference(gate_up, save_fp8=scaling(20.0) if saved_in_fp8 else None).saved
    if scale is None:
        expected = swiglu_plain.backward_reference(dy.double(), saved if saved_in_fp8 else gate_up.double())[0]
        assert_close(swiglu_triton.backward(dy, saved)[0], expected, torch.bfloat16)
        return
    ours, plain = scaling(scale), scaling(scale)
    _, found = swiglu_triton.backward(dy, saved, fp8=ours)
    _, expected8 = swiglu_plain.backward_reference(dy, saved, fp8=plain)
    assert_same_fp8(found, ours, expected8, plain, torch.bfloat16)


def test_swiglu_of_large_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    assert swiglu_triton.forward(gate_up).y.tolist() == [[0.0, 0.0, 180.0, 2e4]]
    assert swiglu_triton.backward(torch.ones(1, 4), gate_up)[0].tolist() == [[0, 0, 2, 2, 0, 0, 90, 1e4]]


def test_what_is_not_finite_becomes_nan_in_fp8_and_leaves_the_scale() -> None:
    gate_up = random(5, 8, dtype=torch.bfloat16)
    gate_up[3, 6] = torch.inf
    ours, saved = scaling(3.0), scaling(5.0)
    found = swiglu_triton.forward(gate_up, fp8=ours, save_fp8=saved)
    assert isinstance(found.saved, Fp8Tensor)
    assert found.y8.data.float().isnan().nonzero().tolist() == [[3, 2]]
    assert found.saved.data.float().isnan().nonzero().tolist() == [[3, 6]]
    assert (ours.scale, saved.scale) == (3.0, 5.0)


# RoPE


@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(37, 3, 1, 16), (5, 2, 2, 6), (70, 1, 1, 2)])
def test_rope_equals_plain(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    qkv = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    cos, sin = rope_plain.tables(torch.arange(tokens) * 3 + 5, size, 10_000.0)
    found = rope_triton.forward(qkv, cos, sin, heads, kv_heads)
    expected = rope_plain.forward_reference(qkv.double(), cos.double(), sin.double(), heads, kv_heads)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.is_contiguous()
        assert_close(ours, plain, dtype)
    assert torch.equal(found[2].flatten(1), qkv[:, -kv_heads * size :])
    gradients = [random(*part.shape, seed=seed, dtype=dtype) for seed, part in enumerate(found)]
    d_qkv, none = rope_triton.backward(*gradients, cos, sin)
    reference, _ = rope_plain.backward_reference(*(d.double() for d in gradients), cos.double(), sin.double())
    assert_close(d_qkv, reference, dtype)
    assert none is None


@SCALES
@FROZEN
@pytest.mark.parametrize("half", [True, False])
def test_gradient_of_rope_in_fp8(half: bool, frozen: bool, scale: float) -> None:
    cos, sin = rope_plain.tables(torch.arange(40), 32, 10_000.0)
    gradients = [random(40, heads, 32, seed=heads, dtype=torch.bfloat16) * 1e-6 for heads in (2, 1, 1)]
    ours, plain = scaling(scale * 1e8), scaling(scale * 1e8)
    d_qkv, found = rope_triton.backward(*gradients, cos, sin, half=half, fp8=ours, frozen_scales=frozen)
    expected_half, expected = rope_plain.backward_reference(
        *gradients, cos, sin, half=half, fp8=plain, frozen_scales=frozen
    )
    assert_same_fp8(found, ours, expected, plain, torch.bfloat16)
    assert (d_qkv is not None) == (expected_half is not None) == half


# Transposes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (128, 256)])
def test_transpose_moves_every_byte(shape: tuple[int, int], dtype: torch.dtype) -> None:
    byte = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scratch = torch.full((byte.numel() + 5,), 0x55, dtype=torch.uint8).view(dtype)
    found = transpose_triton.transpose(byte.view(dtype), scratch)
    assert found.dtype == dtype
    assert found.data_ptr() == scratch.data_ptr()
    assert torch.equal(found.view(torch.uint8), byte.t())
    assert scratch.view(torch.uint8)[-5:].eq(0x55).all()


# The input of an adapter

REGIONS = pytest.mark.parametrize(
    "region",
    [
        Region(),
        Region(torch.tensor([7, 2**19 - 1, 0, 30, 31, 4, 9, 8, 1]), 1000, 64),
        Region(torch.arange(100, 109), 999, 33),
    ],
    ids=["whole", "part", "odd part"],
)


@REGIONS
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("columns", [1, 1100])
def test_dropout_before_an_adapter_equals_plain(columns: int, p: float, region: Region) -> None:
    x, mask = random(9, columns, dtype=torch.bfloat16), DropoutMask(p, SEED, 5)
    assert torch.equal(lora_triton.dropped(x, mask, region), lora_plain.dropped_reference(x, mask, region))
    inverse_rms, weight = random(9, seed=1).abs(), random(columns, seed=2, dtype=torch.bfloat16)
    found = lora_triton.dropped_norm(x, inverse_rms, weight, mask, region)
    assert torch.equal(found, lora_plain.dropped_norm_reference(x, inverse_rms, weight, mask, region))
    again = rms_norm_triton.recompute(x, inverse_rms, weight)
    assert torch.equal(found, lora_triton.dropped(again, mask, region))


@REGIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "rank", "p"), [(200, 16, 0.1), (7, 3, 0.1), (7, 3, 0.0)])
def test_gradient_past_the_dropout_equals_plain(
    columns: int, rank: int, p: float, dtype: torch.dtype, region: Region
) -> None:
    dx, du, a = random(9, columns, dtype=dtype), random(9, rank, seed=1, dtype=dtype), random(rank, columns, seed=2)
    a, mask, found = a.to(dtype), DropoutMask(p, SEED, 5), dx.clone()
    assert lora_triton.add_input_gradient(found, du, a, mask, region) is found
    expected = lora_plain.add_input_gradient_reference(dx.double(), du.double(), a.double(), mask, region)
    assert_close(found, expected, dtype)
