"""Test special values, memory, launches, other tiles and bitwise equality in the kernels of language models.

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
from common.ops.attention.cases import GAPS
from common.ops.attention.reference import attention_reference
from common.ops.bench.worker import tables_of
from common.ops.bias_gelu import triton as bias_gelu_triton
from common.ops.catalogue import cases_of
from common.ops.cross_entropy import triton as cross_entropy_triton
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout_add_norm import DROPOUT_ADD_NORM, dropout_add_norm_reference
from common.ops.dropout_add_norm import triton as dropout_norm_triton
from common.ops.fp8_cast import device
from common.ops.fp8_cast.reference import Fp8Tensor, Handover
from common.ops.lora_input import Region
from common.ops.lora_input import triton as lora_triton
from common.ops.qkv_gradient import QKV_GRADIENT
from common.ops.row_norm import LAYER_NORM_1P
from common.ops.row_norm import triton as row_norm_triton
from common.ops.swiglu import SWIGLU
from common.ops.swiglu import triton as swiglu_triton
from tests.drawn_tensors import normal, scaling
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

CPU = torch.device("cpu")
SEED = torch.tensor(-0x0123456789ABCDEF)


# Tiles that sizes of tests do not choose


@pytest.mark.parametrize(
    ("operation", "number", "changes", "sizes"),
    [
        (ATTENTION, 0, {"queries": 64, "keys": 32}, GAPS),
        (ATTENTION, 0, {"queries": 32, "keys": 128}, GAPS),
        # every third row is in the sample for a first scale, and each of the programs computes the sample
        (DROPOUT_ADD_NORM, 1, {"rows": 16, "programs": 3}, {"tokens": 80, "features": 48}),
        *(
            (SWIGLU, 1, {"rows": 16, "columns": 128, "programs": 3}, sizes)
            for sizes in (
                {"tokens": 37, "features": 200, "fp8": False, "save": False},
                {"tokens": 70, "features": 130},
                {"tokens": 70, "features": 130, "scales": (0.0, 3.7, 37.0), "frozen": True},
            )
        ),
        (LAYER_NORM_1P, 0, {"programs": 3}, {"tokens": 25, "features": 24}),
        (
            QKV_GRADIENT, 0, {"rows": 16, "programs": 12},
            {"tokens": 40, "heads": 2, "head_size": 16, "layout": "mixed"},
        ),
    ],
)  # fmt: skip
def test_other_tiles_give_what_the_reference_does(operation, number, changes, sizes, monkeypatch):
    for tiles in tables_of(operation, "triton"):
        for key, tile in tiles.items():
            monkeypatch.setitem(tiles, key, tile.replace(**{n: v for n, v in changes.items() if n in vars(tile)}))
    case = cases_of(operation)[number]
    check(operation, "triton", case, sizes, case.dtypes[-1], CPU)


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
def test_attention_with_extreme_scores_is_finite_and_right(scale):
    qkv, d_context = normal(80, 3, 2, 32, dtype=torch.float32) * scale, normal(80, 2, 32, seed=1, dtype=torch.float32)
    results = attend(attention_triton.attention, qkv, d_context, (70, 9))
    for found, expected in zip(
        results, attend(attention_reference, qkv.double(), d_context.double(), (70, 9)), strict=True
    ):
        assert found.isfinite().all()
        assert (found - expected).norm() < 1e-3 * expected.norm()


def test_attention_with_all_scores_far_below_those_of_absent_keys_is_finite():
    """An absent key has score 0; relative to real scores of -2,000, its probability overflows."""
    qkv = normal(80, 3, 1, 32, dtype=torch.float32) * 0.1
    qkv[:, 0] += 20
    qkv[:, 1] -= 20
    for found in attend(attention_triton.attention, qkv, normal(80, 1, 32, dtype=torch.float32), (70,)):
        assert found.isfinite().all()


@pytest.mark.parametrize(("length", "scale"), [(1, 3000.0), (2, 8000.0), (3, 8000.0)])
def test_large_gradients_of_short_sequences_stay_finite_in_fp16(length, scale):
    """A key after the end has no d_probability that balances delta, 32 * ``scale`` here, so it must not count in dq."""
    qkv = normal(length, 3, 1, 32, dtype=torch.float32) * 0.3
    qkv[:, 2] = 1 + 0.03 * qkv[:, 2]
    qkv, d_context = qkv.half(), (normal(length, 1, 32, seed=1, dtype=torch.float32) + scale).half()
    found = attend(attention_triton.attention, qkv, d_context, (length,), 0.0)[1][:, 0]
    expected = attend(attention_reference, qkv.double(), d_context.double(), (length,), 0.0)[1][:, 0]
    assert found.isfinite().all()
    # dq is the small difference of large terms that fp16 has rounded: the error goes by their size
    assert float((found.double() - expected).abs().max()) < 1e-3 * scale


def test_a_gradient_of_attention_that_is_not_finite_leaves_the_scale():
    d_context, state = normal(96, 2, 32, seed=2), scaling(3.0)
    d_context[80, 1, 5] = float("inf")
    handover = Handover(state)
    qkv = normal(96, 3, 2, 32).requires_grad_()
    starts, lengths = torch.tensor([3, 75, 0]), torch.tensor([70, 9, 0])
    attention_triton.attention(
        qkv, starts, lengths, 80, DropoutMask(0.1, SEED, 4), handover=handover
    ).backward(d_context)  # fmt: skip
    found = handover.take()
    assert found.data[76:84].float().isnan().any()
    assert not found.data[:74].float().isnan().any()
    assert state.scale == 3.0
    assert not state.pending.any()


def test_attention_refuses_a_head_dimension_without_kernels():
    length = torch.tensor([3])
    with pytest.raises(ValueError, match="48"):
        attention_triton.attention(
            normal(8, 3, 1, 48, dtype=torch.float32), length - 3, length, 64, DropoutMask(0.1, SEED, 0)
        )


# Dropout, residual and norm


def norm_inputs() -> list[Tensor]:
    """Return x, bias, residual, weight, and the bias of the norm."""
    shapes = ((4, 32), (32,), (4, 32), (32,), (32,))
    return [normal(*shape, seed=seed, dtype=torch.float32).requires_grad_() for seed, shape in enumerate(shapes)]


def norm(inputs: list[Tensor], twice: bool = True) -> Any:
    return dropout_norm_triton.dropout_add_norm(*inputs, 1e-12, DropoutMask(0.1, SEED, 6), twice)


def test_norm_launches_one_backward_for_two_readers_and_no_sum(monkeypatch):
    given = []
    original = dropout_norm_triton.backward

    def record(dy: Tensor, other: Tensor | None, *rest: Any) -> Any:
        given.append((dy, other))
        return original(dy, other, *rest)

    monkeypatch.setattr(dropout_norm_triton, "backward", record)
    first, second = normal(4, 32, seed=9, dtype=torch.float32), normal(4, 32, seed=10, dtype=torch.float32)
    torch.autograd.backward(norm(norm_inputs()), [first, second])
    assert [(torch.equal(dy, first), torch.equal(other, second)) for dy, other in given] == [(True, True)]


@pytest.mark.parametrize("gradients", [True, False])
def test_norm_for_two_readers_takes_the_memory_of_one(gradients):
    inputs = norm_inputs()
    with torch.set_grad_enabled(gradients):
        (first, second), alone = norm(inputs), norm(inputs, twice=False)
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, alone)
    assert first.requires_grad == second.requires_grad == alone.requires_grad == gradients


def test_norm_whose_readers_have_no_gradient_has_none():
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


def test_norm_far_from_zero_keeps_its_variance():
    inputs = [x.detach() for x in norm_inputs()]
    inputs[2] += 1e3
    rest = (1e-12, DropoutMask(0.0, SEED, 0))
    found = dropout_norm_triton.dropout_add_norm(*inputs, *rest)
    expected = dropout_add_norm_reference(*(x.double() for x in inputs), *rest)
    assert (found - expected).abs().max() < 1e-3


# GELU


def test_gelu_of_large_values_saturates():
    x = torch.tensor([[-1e4, -30.0, 30.0, 1e4]], requires_grad=True)
    y = bias_gelu_triton.bias_gelu(x, torch.zeros(4))
    y.sum().backward()
    assert y.tolist() == [[0.0, 0.0, 30.0, 1e4]]
    assert x.grad.tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_gelu_of_many_rows_stays_inside_the_limits_of_a_grid(monkeypatch):
    grids = []

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
def test_a_gradient_of_gelu_that_is_not_finite_leaves_the_scale(value):
    x, bias, dy = (normal(*shape) for shape in ((48, 64), (64,), (48, 64)))
    dy[40, 3] = value
    state = scaling(5.0)
    found = bias_gelu_triton.backward(dy, x, bias, fp8=state)
    expected = torch.zeros(48, 64, dtype=torch.bool)
    expected[40, 3] = True
    assert torch.equal(found.dx8.data.float().isnan(), expected)
    assert not found.bias[3].isfinite()
    assert state.scale == 5.0


# Cross-entropy


def test_the_gradient_of_logits_takes_their_memory_only_where_it_may():
    for inplace in (False, True):
        logits = normal(3, 100, dtype=torch.float32).requires_grad_()
        losses, _ = cross_entropy_triton.masked_cross_entropy(logits, torch.tensor([1, -1, 2]), 100, inplace)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert (gradient.data_ptr() == logits.data_ptr()) == inplace


def test_cross_entropy_of_nan_logits_is_nan_and_wrong():
    logits = torch.full((1, 10), float("nan"))
    losses, correct = cross_entropy_triton.masked_cross_entropy(logits, torch.tensor([0]), 10)
    assert losses.isnan().all()
    assert not correct.any()


# Norms and SwiGLU of decoders


def test_rms_norm_of_zeros_without_epsilon_in_missing_rows_leaves_a_scale():
    """Rows of the sample beyond the last one have no root mean square."""
    ours = scaling()
    row_norm_triton.forward(normal(3, 8), None, torch.ones(8), 0.0, fp8=ours)
    assert 448 / 3 < ours.scale < 448


@pytest.mark.parametrize("region", [Region(), Region(torch.arange(100, 109), 2999, 33)], ids=["whole", "part"])
def test_a_recomputed_norm_and_its_dropout_have_the_bits_of_the_first_time(region):
    residual, weight, mask = normal(9, 1100), normal(1100, seed=1), DropoutMask(0.1, torch.tensor(-5), 5)
    normed = row_norm_triton.forward(residual, None, weight, 1e-5)
    assert normed.residual is residual
    assert normed.y is not None
    assert torch.equal(row_norm_triton.recompute(residual, normed.moments, weight), normed.y)
    found = lora_triton.dropped_norm(residual, normed.moments, weight, mask, region)
    assert torch.equal(found, lora_triton.dropped(normed.y, mask, region))


def test_swiglu_of_large_gates_is_finite():
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    assert swiglu_triton.forward(gate_up).y.tolist() == [[0.0, 0.0, 180.0, 2e4]]
    assert swiglu_triton.backward(torch.ones(1, 4), gate_up)[0].tolist() == [[0, 0, 2, 2, 0, 0, 90, 1e4]]


def test_what_is_not_finite_becomes_nan_in_fp8_and_leaves_the_scale():
    gate_up = normal(5, 8)
    gate_up[3, 6] = torch.inf
    ours, saved = scaling(3.0), scaling(5.0)
    found = swiglu_triton.forward(gate_up, fp8=ours, save_fp8=saved)
    assert isinstance(found.saved, Fp8Tensor)
    assert found.y8.data.float().isnan().nonzero().tolist() == [[3, 2]]
    assert found.saved.data.float().isnan().nonzero().tolist() == [[3, 6]]
    assert (ours.scale, saved.scale) == (3.0, 5.0)


def test_layer_norm_of_missing_rows_without_epsilon_leaves_a_scale():
    """Rows of the sample beyond the last one, to which a bias is added, have no variance."""
    ours = scaling()
    zeros = torch.zeros(8)
    row_norm_triton.forward(normal(3, 8), None, zeros, 0.0, zeros, torch.full((8,), 7.0), fp8=ours)
    assert 448 / 3 < ours.scale < 448
