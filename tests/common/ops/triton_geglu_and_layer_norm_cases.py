"""The Triton kernels of GEGLU and of the residual addition with LayerNorm against the references in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from common.ops.add_layer_norm import triton as norm_triton
from common.ops.add_layer_norm.reference import add_layer_norm_reference
from common.ops.geglu import triton as geglu_triton
from common.ops.geglu.reference import geglu_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"{name}: relative error {error:.2e}"


def compare(
    function: Callable[..., Sequence[Tensor]],
    plain: Callable[..., Sequence[Tensor]],
    inputs: dict[str, Tensor | None],
    d_outputs: Sequence[Tensor | None],
) -> None:
    """Results and the gradients of all inputs, where the results without a gradient are not read."""

    def run(function: Callable[..., Sequence[Tensor]], wide: bool) -> dict[str, Tensor]:
        leaves = {
            name: None if x is None else (x.double() if wide else x).detach().clone().requires_grad_()
            for name, x in inputs.items()
        }
        results = function(**leaves)
        read = [(y, dy.double() if wide else dy) for y, dy in zip(results, d_outputs, strict=True) if dy is not None]
        torch.autograd.backward([y for y, _ in read], [dy for _, dy in read])
        found = {f"result {index}": y.detach() for index, y in enumerate(results)}
        return found | {name: x.grad for name, x in leaves.items() if x is not None and x.grad is not None}

    found, expected = run(function, False), run(plain, True)
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        given = inputs.get(name)
        dtype = next(x.dtype for x in inputs.values() if x is not None)
        assert found[name].dtype == (dtype if given is None else given.dtype)
        assert_close(found[name], reference, TOLERANCE[dtype], name)


# GEGLU


def check_geglu(rows: int, features: int, dtype: torch.dtype, bias: torch.dtype | None) -> None:
    inputs = {
        "x_R2C": random(rows, 2 * features, dtype=dtype) * 2,
        "bias_2C": None if bias is None else random(2 * features, seed=1, dtype=bias),
    }
    compare(
        lambda **given: [geglu_triton.geglu(**given)],
        lambda **given: [geglu_reference(**given)],
        inputs,
        [random(rows, features, seed=2, dtype=dtype)],
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    check_geglu(9, 80, dtype, dtype if bias else None)


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (70, 24), (33, 320)])
def test_geglu_of_any_size_equals_plain(rows: int, features: int) -> None:
    check_geglu(rows, features, torch.float32, torch.float32)


def test_geglu_of_half_precision_with_a_wide_bias_equals_plain() -> None:
    check_geglu(9, 32, torch.float16, torch.float32)


def test_geglu_far_from_zero_is_the_product_or_nothing() -> None:
    x = torch.tensor([[3.0, 3.0, 3.0, 30.0, -30.0, 0.0]], requires_grad=True)
    y = geglu_triton.geglu(x, None)
    y.backward(torch.ones(1, 3))
    assert y.tolist() == [[90.0, 0.0, 0.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[30.0, 0.0, 0.0, 3.0, 0.0, 1.5]]


def test_geglu_takes_rows_that_lie_apart() -> None:
    x, dy = random(6, 48), random(6, 32, seed=1)[:, :16]
    found, expected = (
        torch.autograd.grad(function(leaf, None), leaf, given)[0]
        for function, leaf, given in (
            (geglu_triton.geglu, x[:, :32].detach().requires_grad_(), dy),
            (geglu_reference, x[:, :32].double().requires_grad_(), dy.double()),
        )
    )
    assert_close(found, expected, 2e-6, "x")


# Residual addition and LayerNorm


def norm_inputs(rows: int, features: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    return {
        "x_RC": random(rows, features, dtype=dtype),
        "residual_RC": random(rows, features, seed=1, dtype=dtype) + 2,
        "weight_C": random(features, seed=2, dtype=dtype),
        "bias_C": random(features, seed=3, dtype=dtype),
        "added_C": random(features, seed=4, dtype=dtype),
    }


def check_norm(inputs: dict[str, Tensor | None], read: tuple[bool, bool] = (True, True)) -> None:
    x = inputs["x_RC"]
    assert x is not None
    d_outputs = [random(*x.shape, seed=5 + i, dtype=x.dtype) if wanted else None for i, wanted in enumerate(read)]

    def rounded(**given: Tensor) -> tuple[Tensor, Tensor]:
        # the sum is rounded before it is normalised, which float64 does not do by itself
        total, _ = add_layer_norm_reference(**given, eps=1e-5)
        _, normed = add_layer_norm_reference(
            total + (total.detach().to(x.dtype) - total.detach()), None, given["weight_C"], given["bias_C"], 1e-5
        )
        return total, normed

    compare(lambda **given: norm_triton.add_layer_norm(**given, eps=1e-5), rounded, inputs, d_outputs)


@pytest.mark.parametrize("absent", [(), ("added_C",), ("residual_RC",), ("added_C", "residual_RC")])
def test_norm_equals_plain(absent: tuple[str, ...]) -> None:
    check_norm(norm_inputs(13, 80) | dict.fromkeys(absent))


@pytest.mark.parametrize("read", [(True, False), (False, True)])
@pytest.mark.parametrize("absent", [(), ("added_C", "residual_RC")])
def test_norm_of_which_one_result_is_read_equals_plain(absent: tuple[str, ...], read: tuple[bool, bool]) -> None:
    check_norm(norm_inputs(5, 48) | dict.fromkeys(absent), read)


@pytest.mark.parametrize("features", [1, 7, 320, pytest.param(1280, marks=pytest.mark.slow)])
def test_norm_of_any_width_equals_plain(features: int) -> None:
    inputs = norm_inputs(6, features)
    # a single feature is its own mean: what is left has no gradient but that of the sum
    check_norm(inputs, (True, False) if features == 1 else (True, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_half_precision_equals_plain(dtype: torch.dtype) -> None:
    check_norm(norm_inputs(10, 64, dtype))


def test_norm_with_parameters_of_two_dtypes_equals_plain() -> None:
    inputs = norm_inputs(10, 64, torch.float16)
    for name in ("weight_C", "bias_C"):
        value = inputs[name]
        assert value is not None
        inputs[name] = value.float()
    check_norm(inputs)


def test_norm_with_many_groups_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(norm_triton.TILES):
        monkeypatch.setitem(norm_triton.TILES, name, norm_triton.Tile(64, 4, 3))
    check_norm(norm_inputs(31, 32))


def test_norm_far_from_zero_keeps_its_variance() -> None:
    inputs = norm_inputs(4, 256)
    residual = inputs["residual_RC"]
    assert residual is not None
    inputs["residual_RC"] = residual + 1e3
    total, normed = norm_triton.add_layer_norm(**inputs, eps=1e-5)
    _, expected = add_layer_norm_reference(
        total.double(), None, *(inputs[name].double() for name in ("weight_C", "bias_C")), 1e-5
    )
    assert (normed - expected).abs().max() < 1e-3


def test_norm_with_nothing_to_add_writes_no_sum_and_adds_both_gradients_in_its_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Tensor | None] = []
    original = norm_triton.backward

    def record(d_sum: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
        given.append(d_sum)
        return original(d_sum, *rest)

    monkeypatch.setattr(norm_triton, "backward", record)
    x, weight, bias = (value.requires_grad_() for value in (random(4, 32), random(32, seed=1), random(32, seed=2)))
    total, normed = norm_triton.add_layer_norm(x, None, weight, bias, 1e-5)
    assert total.data_ptr() == x.data_ptr()
    d_total = random(4, 32, seed=3)
    torch.autograd.backward([total, normed], [d_total, random(4, 32, seed=4)])
    assert len(given) == 1
    assert torch.equal(given[0], d_total)
