"""The Triton operations of a transformer against the references in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops.attention import triton as attention_triton
from common.ops.attention.reference import attention_reference
from common.ops.bias_gelu import kernels as bias_gelu_kernels
from common.ops.bias_gelu import triton as bias_gelu_triton
from common.ops.bias_gelu.reference import bias_gelu_reference
from common.ops.cross_entropy import triton as cross_entropy_triton
from common.ops.cross_entropy.reference import masked_cross_entropy_reference
from common.ops.dropout import triton as dropout_triton
from common.ops.dropout.reference import DropoutMask, dropout_reference, keep_mask
from common.ops.dropout_add_norm import triton as dropout_add_norm_triton
from common.ops.dropout_add_norm.reference import dropout_add_norm_reference
from common.ops.tiling import column_sums as column_sums_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SEED = torch.tensor(-0x0123456789ABCDEF)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are a matter of registers: cut fp32 as 16-bit types are, so that it is their path that is compared."""
    monkeypatch.setattr(attention_triton, "FLOAT32_TILES", attention_triton.TILES)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values_and_gradients(
    function: Callable[..., Tensor], inputs: dict[str, Tensor | None], d_output: Tensor
) -> dict[str, Tensor]:
    """The result of ``function(**inputs)`` and the gradient of every input."""
    leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    y = function(**leaves)
    y.backward(d_output)
    return {"output": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, reference in expected.items():
        error = (found[name].double() - reference).norm() / reference.norm().clamp(min=1e-6)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def wide(inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if x is None else x.double() for name, x in inputs.items()}


# Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("count", [1, 1001, 3 * dropout_triton.BLOCK])
def test_dropout_mask_is_the_reference(count: int, p: float) -> None:
    for site, seed in ((0, SEED), (1, SEED), (16, torch.tensor(5)), (1_000_003, torch.tensor(1 << 40))):
        kept = dropout_triton.dropout(torch.ones(count), p, seed, site) != 0
        assert torch.equal(kept, keep_mask(seed, site, count, p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_equals_plain(dtype: torch.dtype) -> None:
    x, dy = random(7, 333, dtype=dtype), random(7, 333, seed=1, dtype=dtype)
    found = values_and_gradients(lambda x: dropout_triton.dropout(x, 0.1, SEED, 3), {"x": x}, dy)
    expected = values_and_gradients(lambda x: dropout_reference(x, 0.1, SEED, 3), {"x": x.double()}, dy.double())
    assert_close(found, expected, TOLERANCE[dtype])


def test_no_dropout_returns_its_input() -> None:
    x = random(5)
    assert dropout_triton.dropout(x, 0.0, SEED, 3) is x


# Attention

MIXED = {
    "all_lengths": (1, 5, 63, 64, 65, 512),
    "absent": (100, 3, 0, 0),
    "none": (0, 0),
}


def back_to_back(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    ends = torch.tensor(lengths).cumsum(0)
    starts = torch.where(torch.tensor(lengths) > 0, ends - torch.tensor(lengths), 0)
    return starts.int(), torch.tensor(lengths, dtype=torch.int32)


def members(tokens: int, starts: Tensor, lengths: Tensor) -> Tensor:
    """Which rows of the buffer belong to a sequence."""
    member = torch.zeros(tokens, dtype=torch.bool)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        member[start : start + length] = True
    return member


def check_attention(
    tokens: int,
    starts: Tensor,
    lengths: Tensor,
    max_length: int,
    p: float,
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    dimension: int = 32,
) -> None:
    """Result and gradient against the reference, with NaN in all rows of no sequence, which become zeros."""
    outside = ~members(tokens, starts, lengths)
    qkv, d_context = random(tokens, 3, heads, dimension, dtype=dtype), random(tokens, heads, dimension, seed=1)
    d_context = d_context.to(dtype)
    expected = values_and_gradients(
        lambda qkv: attention_reference(qkv, starts, lengths, max_length, DropoutMask(p, SEED, 11)),
        {"qkv": qkv.double()},
        d_context.double(),
    )
    qkv[outside], d_context[outside] = float("nan"), float("nan")
    found = values_and_gradients(
        lambda qkv: attention_triton.attention(qkv, starts, lengths, max_length, DropoutMask(p, SEED, 11)),
        {"qkv": qkv},
        d_context,
    )
    assert found["output"].dtype == found["qkv"].dtype == dtype
    assert found["output"][outside].eq(0).all()
    assert found["qkv"][outside].eq(0).all()
    assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "p"),
    [
        ("all_lengths", 0.1),
        ("absent", 0.0),
        ("none", 0.1),
        pytest.param("all_lengths", 0.0, marks=pytest.mark.slow),
        pytest.param("absent", 0.1, marks=pytest.mark.slow),
        pytest.param("none", 0.0, marks=pytest.mark.slow),
    ],
)
def test_attention_equals_plain_at_lengths(name: str, p: float) -> None:
    starts, lengths = back_to_back(MIXED[name])
    check_attention(800, starts, lengths, 512, p)


@pytest.mark.parametrize(
    ("dtype", "dimension"),
    [
        (torch.float16, 64),
        (torch.bfloat16, 128),
        pytest.param(torch.float16, 32, marks=pytest.mark.slow),
        pytest.param(torch.float16, 128, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 32, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 64, marks=pytest.mark.slow),
    ],
)
def test_attention_in_half_precision_equals_plain(dimension: int, dtype: torch.dtype, bfloat16_products: None) -> None:
    starts, lengths = back_to_back((130, 7))
    check_attention(140, starts, lengths, 192, 0.1, dtype, dimension=dimension)


def test_attention_in_a_full_buffer() -> None:
    starts, lengths = back_to_back((64, 128, 64))
    check_attention(256, starts, lengths, 128, 0.1)


def test_attention_over_an_odd_max_length() -> None:
    starts, lengths = back_to_back((77, 20, 3))
    check_attention(101, starts, lengths, 77, 0.1, heads=3)


def test_attention_with_gaps_between_sequences_in_any_order() -> None:
    starts, lengths = torch.tensor([300, 10, 170, 0]), torch.tensor([70, 100, 1, 0])
    check_attention(400, starts, lengths, 100, 0.1)


def test_attention_over_many_sequences() -> None:
    starts, lengths = back_to_back((3,) * 70)
    check_attention(4 * 64 + 5, starts, lengths, 16, 0.1, heads=1)


def test_attention_mask_is_the_reference() -> None:
    """Equal scores and one-hot values: the context is the mask, whose row sums are known."""
    length, heads, max_length, start, site = 64, 2, 80, 5, 9
    qkv = torch.zeros(length + start, 3, heads, 64)
    qkv[start:, 2] = torch.eye(64)[:, None]
    starts, lengths = torch.tensor([start], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    context = attention_triton.attention(qkv, starts, lengths, max_length, DropoutMask(0.1, SEED, site))
    token, head = torch.arange(start, start + length)[:, None, None], torch.arange(heads)[None, :, None]
    index = (token * heads + head) * max_length + torch.arange(length)
    assert torch.equal(context[start:] != 0, keep_mask(SEED, site, index, 0.1))


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_attention_with_extreme_scores_is_finite_and_right(scale: float) -> None:
    starts, lengths = back_to_back((70, 9))
    qkv, d_context = random(80, 3, 2, 32) * scale, random(80, 2, 32, seed=1)
    found, expected = (
        values_and_gradients(
            lambda qkv, f=f: f(qkv, starts, lengths, 96, DropoutMask(0.1, SEED, 2)), {"qkv": qkv.to(d)}, d_context.to(d)
        )
        for f, d in ((attention_triton.attention, torch.float32), (attention_reference, torch.float64))
    )
    assert found["qkv"].isfinite().all()
    assert_close(found, expected, 1e-3)


def test_attention_with_all_scores_far_below_those_of_absent_keys_is_finite() -> None:
    """A key that does not exist has score 0; relative to real scores of -2,000 its probability overflows."""
    starts, lengths = back_to_back((70,))
    qkv = random(80, 3, 1, 32) * 0.1
    qkv[:, 0] += 20
    qkv[:, 1] -= 20
    found = values_and_gradients(
        lambda qkv: attention_triton.attention(qkv, starts, lengths, 96, DropoutMask(0.1, SEED, 2)),
        {"qkv": qkv},
        random(80, 1, 32),
    )
    assert found["output"].isfinite().all()
    assert found["qkv"].isfinite().all()


@pytest.mark.parametrize(("length", "scale"), [(1, 3000.0), (2, 8000.0), (3, 8000.0)])
def test_large_gradients_of_short_sequences_stay_finite_in_fp16(length: int, scale: float) -> None:
    """A key behind the end has no d_probability to balance delta, 32 * ``scale`` here: it must take no part in dq."""
    starts, lengths = back_to_back((length,))
    qkv = random(length, 3, 1, 32) * 0.3
    qkv[:, 2] = 1 + 0.03 * qkv[:, 2]
    qkv, d_context = qkv.half(), (random(length, 1, 32, seed=1) + scale).half()
    found, expected = (
        values_and_gradients(
            lambda qkv, f=f: f(qkv, starts, lengths, 64, DropoutMask(0.0, SEED, 2)), {"qkv": qkv.to(d)}, d_context.to(d)
        )["qkv"][:, 0]
        for f, d in ((attention_triton.attention, torch.float16), (attention_reference, torch.float64))
    )
    assert found.isfinite().all()
    # dq is the small difference of large terms that fp16 has rounded: the error goes by their size
    assert float((found.double() - expected).abs().max()) < 1e-3 * scale


def test_attention_sums_the_gradient_of_a_bias() -> None:
    starts, lengths = back_to_back((65, 130, 1, 0))
    qkv, bias = random(210, 3, 2, 32).requires_grad_(), random(3 * 2 * 32, seed=2).requires_grad_()
    context = attention_triton.attention(qkv, starts, lengths, 192, DropoutMask(0.1, SEED, 4), bias)
    context.backward(random(210, 2, 32, seed=1))
    assert qkv.grad is not None
    assert bias.grad is not None
    expected = qkv.grad.double().sum(0).flatten()
    assert (bias.grad - expected).norm() < 1e-5 * expected.norm()


def test_attention_refuses_a_head_dimension_without_kernels() -> None:
    starts, lengths = back_to_back((3,))
    with pytest.raises(ValueError, match="48"):
        attention_triton.attention(random(8, 3, 1, 48), starts, lengths, 64, DropoutMask(0.1, SEED, 0))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (64, 32),
        (32, 128),
        *(pytest.param(*tiles, marks=pytest.mark.slow) for tiles in ((32, 32), (32, 64), (64, 64), (64, 128))),
    ],
)
def test_attention_with_other_tiles(queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tile in attention_triton.TILES.items():
        monkeypatch.setitem(attention_triton.TILES, name, tile._replace(queries=queries, keys=keys))
    starts, lengths = back_to_back((130, 33))
    check_attention(164, starts, lengths, 144, 0.1)


# Dropout, residual and norm


def check_norm(inputs: dict[str, Tensor | None], p: float, epsilon: float = 1e-12) -> None:
    x = inputs["x"]
    assert x is not None
    dy = random(*x.shape, seed=9, dtype=x.dtype)

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, bias, residual, weight, norm_bias: function(
            x, bias, residual, weight, norm_bias, epsilon, DropoutMask(p, SEED, 6)
        )

    found = values_and_gradients(call(dropout_add_norm_triton.dropout_add_norm), inputs, dy)
    expected = values_and_gradients(call(dropout_add_norm_reference), wide(inputs), dy.double())
    for name, value in inputs.items():
        assert value is None or found[name].dtype == value.dtype
    assert_close(found, expected, TOLERANCE[x.dtype])


def norm_inputs(tokens: int, features: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    return {
        "x": random(tokens, features, dtype=dtype),
        "bias": random(features, seed=1, dtype=dtype),
        "residual": random(tokens, features, seed=2, dtype=dtype) + 2,
        "weight": random(features, seed=3, dtype=dtype),
        "norm_bias": random(features, seed=4, dtype=dtype),
    }


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("absent", [(), ("bias",), ("residual",), ("bias", "residual")])
def test_norm_equals_plain(absent: tuple[str, ...], p: float) -> None:
    check_norm(norm_inputs(13, 96) | dict.fromkeys(absent), p)


@pytest.mark.parametrize("features", [1, 7, 64, 1000])
def test_norm_of_any_width_equals_plain(features: int) -> None:
    check_norm(norm_inputs(6, features), 0.1, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_half_precision_equals_plain(dtype: torch.dtype) -> None:
    check_norm(norm_inputs(10, 128, dtype), 0.1)


def test_norm_with_parameters_of_two_dtypes_equals_plain() -> None:
    inputs = norm_inputs(10, 64, torch.float16)
    for name in ("weight", "norm_bias"):
        inputs[name] = inputs[name].float()
    check_norm(inputs, 0.1)


def test_norm_with_many_groups_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tile in dropout_add_norm_triton.TILES.items():
        monkeypatch.setitem(dropout_add_norm_triton.TILES, name, tile._replace(programs=min(3, tile.programs)))
    check_norm(norm_inputs(31, 32), 0.1)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_the_gradients_of_its_readers(dtype: torch.dtype, used: tuple[int, ...]) -> None:
    inputs = norm_inputs(13, 96, dtype)
    d_outputs = [random(13, 96, seed=9 + index, dtype=dtype) for index in used]
    found = norm_of_readers(dropout_add_norm_triton.dropout_add_norm, inputs, used, d_outputs)
    expected = norm_of_readers(dropout_add_norm_reference, wide(inputs), used, [dy.double() for dy in d_outputs])
    assert_close(found, expected, TOLERANCE[dtype])


def norm_of_readers(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor | None],
    used: tuple[int, ...],
    d_outputs: list[Tensor],
) -> dict[str, Tensor]:
    """Both results of the norm, and the gradients of its inputs where only the results ``used`` are read."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
    pair = function(*leaves.values(), 1e-12, DropoutMask(0.1, SEED, 6), twice=True)
    torch.autograd.backward([pair[index] for index in used], d_outputs)
    results = {"first": pair[0].detach(), "second": pair[1].detach()}
    return results | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def test_norm_launches_one_backward_for_two_readers_and_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Tensor, Tensor | None]] = []
    original = dropout_add_norm_triton.backward

    def record(dy: Tensor, other: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        given.append((dy, other))
        return original(dy, other, *rest)

    monkeypatch.setattr(dropout_add_norm_triton, "backward", record)
    inputs = [x.requires_grad_() for x in norm_inputs(4, 32).values() if x is not None]
    first, second = dropout_add_norm_triton.dropout_add_norm(*inputs, 1e-12, DropoutMask(0.1, SEED, 6), twice=True)
    d_first, d_second = random(4, 32, seed=9), random(4, 32, seed=10)
    torch.autograd.backward([first, second], [d_first, d_second])
    assert [(torch.equal(dy, d_first), torch.equal(other, d_second)) for dy, other in given] == [(True, True)]


@pytest.mark.parametrize("gradients", [True, False])
def test_norm_for_two_readers_takes_the_memory_of_one(gradients: bool) -> None:
    inputs = [x.requires_grad_() for x in norm_inputs(4, 32).values() if x is not None]
    with torch.set_grad_enabled(gradients):
        first, second = dropout_add_norm_triton.dropout_add_norm(*inputs, 1e-12, DropoutMask(0.1, SEED, 6), twice=True)
        alone = dropout_add_norm_triton.dropout_add_norm(*inputs, 1e-12, DropoutMask(0.1, SEED, 6))
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, alone)
    assert first.requires_grad == second.requires_grad == alone.requires_grad == gradients


def test_norm_whose_readers_have_no_gradient_has_none() -> None:
    inputs = [x.requires_grad_() for x in norm_inputs(4, 32).values() if x is not None]
    pair = dropout_add_norm_triton.dropout_add_norm(*inputs, 1e-12, DropoutMask(0.1, SEED, 6), twice=True)
    sum(_Ignored.apply(y) for y in pair).sum().backward()
    assert all(x.grad is None for x in inputs)


class _Ignored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def test_norm_far_from_zero_keeps_its_variance() -> None:
    inputs = norm_inputs(4, 256)
    inputs["residual"] = inputs["residual"] + 1e3
    x = dict(inputs)
    found = dropout_add_norm_triton.dropout_add_norm(*x.values(), 1e-12, DropoutMask(0.0, SEED, 0))
    expected = dropout_add_norm_reference(*wide(x).values(), 1e-12, DropoutMask(0.0, SEED, 0))
    assert (found - expected).abs().max() < 1e-3


# GELU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (37, 200), (9, 1030)])
def test_gelu_equals_plain(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = {"x_TF": random(*shape, dtype=dtype) * 3, "bias_F": random(shape[1], seed=1, dtype=dtype)}
    dy = random(*shape, seed=2, dtype=dtype)
    found = values_and_gradients(bias_gelu_triton.bias_gelu, inputs, dy)
    expected = values_and_gradients(bias_gelu_reference, wide(inputs), dy.double())
    assert_close(found, expected, TOLERANCE[dtype])


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

    for name in ("bias_gelu_forward_kernel", "bias_gelu_backward_kernel"):
        monkeypatch.setattr(bias_gelu_kernels, name, Kernel())
    monkeypatch.setattr(bias_gelu_triton, "column_sums", lambda partial, dtype: partial[0])
    x_TF, bias_F = torch.empty(600 * 512, 4096, device="meta"), torch.empty(4096, device="meta")
    bias_gelu_triton.forward(x_TF, bias_F)
    bias_gelu_triton.backward(x_TF, x_TF, bias_F)
    assert len(grids) == 2
    assert all(size < 1 << 16 for grid in grids for size in grid[1:])  # CUDA's limit of all but the first


# Cross-entropy


def logits_and_labels(columns: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows with a label or without, right or wrong by a tie, with NaN where nothing may look."""
    logits = random(7, columns, dtype=dtype) * 4
    labels = torch.tensor([0, vocabulary - 1, -1, vocabulary // 2, 3, -1, 5], dtype=torch.int32)
    logits[0, 0] = 30  # right
    logits[1, vocabulary - 1] = 30  # right
    logits[3, vocabulary // 2] = logits[3, vocabulary // 2 - 1] = 30  # a tie with an earlier one: wrong
    logits[4, 3] = logits[4, 4] = 30  # a tie with a later one: right
    logits[5] = float("nan")
    logits[:, vocabulary:] = float("nan")
    return logits, labels


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "vocabulary"), [(64, 61), (9024, 9001), (4096, 4096)])
def test_cross_entropy_equals_plain(columns: int, vocabulary: int, dtype: torch.dtype, inplace: bool) -> None:
    logits, labels = logits_and_labels(columns, vocabulary, dtype)
    weights = random(7, seed=1)
    plain = torch.nan_to_num(logits.double()).requires_grad_()
    losses, correct = masked_cross_entropy_reference(plain, labels, vocabulary)
    losses.backward(weights.double())
    leaf = logits.clone().requires_grad_()
    found_losses, found_correct = cross_entropy_triton.masked_cross_entropy(leaf, labels, vocabulary, inplace)
    (gradient,) = torch.autograd.grad(found_losses, leaf, weights)
    assert torch.equal(found_correct, correct)
    assert correct.tolist() == [True, True, False, False, True, False, bool(correct[6])]
    assert found_losses[[2, 5]].tolist() == [0.0, 0.0]
    assert gradient[[2, 5]].eq(0).all()
    assert gradient[:, vocabulary:].eq(0).all()
    assert (gradient.data_ptr() == leaf.data_ptr()) == inplace
    found, expected = {"losses": found_losses, "logits": gradient}, {"losses": losses, "logits": plain.grad}
    assert_close(found, expected, max(TOLERANCE[dtype], 1e-5))


def test_cross_entropy_leaves_the_logits_alone() -> None:
    logits, labels = random(3, 100).requires_grad_(), torch.tensor([1, -1, 2])
    before = logits.detach().clone()
    cross_entropy_triton.masked_cross_entropy(logits, labels, 100)[0].sum().backward()
    assert torch.equal(logits, before)


def test_cross_entropy_of_nan_logits_is_nan_and_wrong() -> None:
    logits = torch.full((1, 10), float("nan"))
    losses, correct = cross_entropy_triton.masked_cross_entropy(logits, torch.tensor([0]), 10)
    assert losses.isnan().all()
    assert not correct.any()


# Sums


@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (700, 33)])
def test_column_sums(shape: tuple[int, int]) -> None:
    partial = random(*shape)
    sums = column_sums_triton.column_sums(partial, torch.float32)
    torch.testing.assert_close(sums.double(), partial.double().sum(0), rtol=1e-5, atol=1e-4)
