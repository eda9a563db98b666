"""Test special values, memory, launches and other tiles in the Triton kernels of a transformer.

Cases of the operations cannot express them. tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops.attention import ATTENTION
from common.ops.attention import triton as attention_triton
from common.ops.attention.cases import CASES as ATTENTION_CASES
from common.ops.attention.cases import GAPS
from common.ops.attention.reference import attention_reference
from common.ops.bias_gelu import triton as bias_gelu_triton
from common.ops.cross_entropy import triton as cross_entropy_triton
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout_add_norm import DROPOUT_ADD_NORM, dropout_add_norm_reference
from common.ops.dropout_add_norm import triton as norm_triton
from common.ops.dropout_add_norm.cases import CASES as NORM_CASES
from common.ops.fp8_cast import device
from common.ops.fp8_cast.reference import Handover, Scaling
from common.ops.tile import Tile
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

CPU = torch.device("cpu")
SEED = torch.tensor(-0x0123456789ABCDEF)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


# Attention


def attend(
    function: Callable[..., Tensor], qkv: Tensor, d_context: Tensor, lengths: tuple[int, ...], p: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Return the context of concatenated sequences and the gradient of qkv."""
    ends = torch.tensor(lengths).cumsum(0)
    qkv = qkv.clone().requires_grad_()
    context = function(qkv, ends - torch.tensor(lengths), torch.tensor(lengths), 96, DropoutMask(p, SEED, 2))
    return context.detach(), torch.autograd.grad(context, qkv, d_context)[0]


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_attention_with_extreme_scores_is_finite_and_right(scale: float) -> None:
    qkv, d_context = random(80, 3, 2, 32) * scale, random(80, 2, 32, seed=1)
    results = attend(attention_triton.attention, qkv, d_context, (70, 9))
    for found, expected in zip(
        results, attend(attention_reference, qkv.double(), d_context.double(), (70, 9)), strict=True
    ):
        assert found.isfinite().all()
        assert (found - expected).norm() < 1e-3 * expected.norm()


def test_attention_with_all_scores_far_below_those_of_absent_keys_is_finite() -> None:
    """A key that does not exist has score 0; relative to real scores of -2,000 its probability overflows."""
    qkv = random(80, 3, 1, 32) * 0.1
    qkv[:, 0] += 20
    qkv[:, 1] -= 20
    for found in attend(attention_triton.attention, qkv, random(80, 1, 32), (70,)):
        assert found.isfinite().all()


@pytest.mark.parametrize(("length", "scale"), [(1, 3000.0), (2, 8000.0), (3, 8000.0)])
def test_large_gradients_of_short_sequences_stay_finite_in_fp16(length: int, scale: float) -> None:
    """A key behind the end has no d_probability to balance delta, 32 * ``scale`` here: it must take no part in dq."""
    qkv = random(length, 3, 1, 32) * 0.3
    qkv[:, 2] = 1 + 0.03 * qkv[:, 2]
    qkv, d_context = qkv.half(), (random(length, 1, 32, seed=1) + scale).half()
    found = attend(attention_triton.attention, qkv, d_context, (length,), 0.0)[1][:, 0]
    expected = attend(attention_reference, qkv.double(), d_context.double(), (length,), 0.0)[1][:, 0]
    assert found.isfinite().all()
    # dq is the small difference of large terms that fp16 has rounded: the error goes by their size
    assert float((found.double() - expected).abs().max()) < 1e-3 * scale


def test_a_gradient_of_attention_that_is_not_finite_leaves_the_scale() -> None:
    d_context, state = random(96, 2, 32, seed=2, dtype=torch.bfloat16), scaling(3.0)
    d_context[80, 1, 5] = float("inf")
    handover = Handover(state)
    qkv = random(96, 3, 2, 32, dtype=torch.bfloat16).requires_grad_()
    starts, lengths = torch.tensor([3, 75, 0]), torch.tensor([70, 9, 0])
    attention_triton.attention(
        qkv, starts, lengths, 80, DropoutMask(0.1, SEED, 4), handover=handover
    ).backward(d_context)  # fmt: skip
    found = handover.take()
    assert found is not None
    assert found.data[76:84].float().isnan().any()
    assert not found.data[:74].float().isnan().any()
    assert state.scale == 3.0
    assert not state.pending.any()


def test_attention_refuses_a_head_dimension_without_kernels() -> None:
    length = torch.tensor([3])
    with pytest.raises(ValueError, match="48"):
        attention_triton.attention(random(8, 3, 1, 48), length - 3, length, 64, DropoutMask(0.1, SEED, 0))


@pytest.mark.parametrize(("queries", "keys"), [(64, 32), (32, 128)])
def test_attention_with_other_tiles(queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tile in attention_triton.TILES.items():
        monkeypatch.setitem(attention_triton.TILES, name, tile.replace(queries=queries, keys=keys))
    check(ATTENTION, "triton", ATTENTION_CASES[0], GAPS, torch.float16, CPU)


# Dropout, residual and norm


def norm_inputs() -> list[Tensor]:
    """Return x, bias, residual, weight, and the bias of the norm."""
    shapes = ((4, 32), (32,), (4, 32), (32,), (32,))
    return [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def norm(inputs: list[Tensor], twice: bool = True) -> Any:
    return norm_triton.dropout_add_norm(*inputs, 1e-12, DropoutMask(0.1, SEED, 6), twice)


def test_the_first_use_of_the_scales_of_a_norm_takes_them_from_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has every third row. There are few programs, and each computes the sample."""
    for key in ("forward to fp8", "backward to fp8"):
        monkeypatch.setitem(norm_triton.TILES, key, Tile(rows=16, warps=4, programs=3))
    check(DROPOUT_ADD_NORM, "triton", NORM_CASES[1], {"tokens": 80, "features": 48}, torch.bfloat16, CPU)


def test_norm_launches_one_backward_for_two_readers_and_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Tensor, Tensor | None]] = []
    original = norm_triton.backward

    def record(dy: Tensor, other: Tensor | None, *rest: Any) -> Any:
        given.append((dy, other))
        return original(dy, other, *rest)

    monkeypatch.setattr(norm_triton, "backward", record)
    first, second = random(4, 32, seed=9), random(4, 32, seed=10)
    torch.autograd.backward(norm(norm_inputs()), [first, second])
    assert [(torch.equal(dy, first), torch.equal(other, second)) for dy, other in given] == [(True, True)]


@pytest.mark.parametrize("gradients", [True, False])
def test_norm_for_two_readers_takes_the_memory_of_one(gradients: bool) -> None:
    inputs = norm_inputs()
    with torch.set_grad_enabled(gradients):
        (first, second), alone = norm(inputs), norm(inputs, twice=False)
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, alone)
    assert first.requires_grad == second.requires_grad == alone.requires_grad == gradients


def test_norm_whose_readers_have_no_gradient_has_none() -> None:
    inputs = norm_inputs()
    sum(_Ignored.apply(y) for y in norm(inputs)).sum().backward()
    assert all(x.grad is None for x in inputs)


class _Ignored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def test_norm_far_from_zero_keeps_its_variance() -> None:
    inputs = [x.detach() for x in norm_inputs()]
    inputs[2] += 1e3
    rest = (1e-12, DropoutMask(0.0, SEED, 0))
    found = norm_triton.dropout_add_norm(*inputs, *rest)
    expected = dropout_add_norm_reference(*(x.double() for x in inputs), *rest)
    assert (found - expected).abs().max() < 1e-3


# GELU


def test_gelu_of_large_values_saturates() -> None:
    x = torch.tensor([[-1e4, -30.0, 30.0, 1e4]], requires_grad=True)
    y = bias_gelu_triton.bias_gelu(x, torch.zeros(4))
    y.sum().backward()
    assert y.tolist() == [[0.0, 0.0, 30.0, 1e4]]
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_gelu_of_many_rows_stays_inside_the_limits_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **constants: None

    monkeypatch.setattr(device, "tiles_kernel", Kernel())
    monkeypatch.setattr(bias_gelu_triton, "column_sums", lambda partial, dtype: partial[0])
    x_TF, bias_F = torch.empty(600 * 512, 4096, device="meta"), torch.empty(4096, device="meta")
    bias_gelu_triton.forward(x_TF, bias_F)
    bias_gelu_triton.backward(x_TF, x_TF, bias_F)
    assert len(grids) == 2
    assert all(size < 1 << 16 for grid in grids for size in grid[1:])  # CUDA's limit of all but the first


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_of_gelu_that_is_not_finite_leaves_the_scale(value: float) -> None:
    x, bias, dy = (random(*shape, dtype=torch.bfloat16) for shape in ((48, 64), (64,), (48, 64)))
    dy[40, 3] = value
    state = scaling(5.0)
    found = bias_gelu_triton.backward(dy, x, bias, fp8=state)
    expected = torch.zeros(48, 64, dtype=torch.bool)
    expected[40, 3] = True
    assert found.dx8 is not None
    assert torch.equal(found.dx8.data.float().isnan(), expected)
    assert not found.bias[3].isfinite()
    assert state.scale == 5.0


# Cross-entropy


def test_the_gradient_of_logits_takes_their_memory_only_where_it_may() -> None:
    for inplace in (False, True):
        logits = random(3, 100).requires_grad_()
        losses, _ = cross_entropy_triton.masked_cross_entropy(logits, torch.tensor([1, -1, 2]), 100, inplace)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert (gradient.data_ptr() == logits.data_ptr()) == inplace


def test_cross_entropy_of_nan_logits_is_nan_and_wrong() -> None:
    logits = torch.full((1, 10), float("nan"))
    losses, correct = cross_entropy_triton.masked_cross_entropy(logits, torch.tensor([0]), 10)
    assert losses.isnan().all()
    assert not correct.any()


# Casts to FP8


# Sums
