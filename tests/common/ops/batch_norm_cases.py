"""The Triton batch norm against the formula; run by
tests/test_interpreted_kernels.py."""

from __future__ import annotations

import pytest
import torch
from batch_norm_oracle import KINDS, Formula, disagreement, inputs, parameters, run

from common.ops.batch_norm import pool_triton as batch_norm_pool_triton
from common.ops.batch_norm import triton as batch_norm_triton
from common.ops.batch_norm.reference import Norm, batch_norm_evaluate_reference

SHAPES = ((3, 24, 5, 7), (2, 16, 8, 8), (5, 8, 1, 1), (2, 72, 3, 3))
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Triton:
    batch_norm = staticmethod(batch_norm_triton.batch_norm)
    batch_norm_add_relu = staticmethod(batch_norm_triton.batch_norm_add_relu)
    batch_norm_relu_max_pool = staticmethod(batch_norm_pool_triton.batch_norm_relu_max_pool)


def moments_of(x: torch.Tensor) -> torch.Tensor:
    """Sums of x and of its square, as a convolution leaves them."""
    return torch.stack([x.double().sum((0, 2, 3)), x.double().square().sum((0, 2, 3))])[:, None].float()


class TritonWithMoments:
    @staticmethod
    def batch_norm(x: torch.Tensor, norm: Norm, **options: object) -> torch.Tensor:
        return batch_norm_triton.batch_norm(x, norm, moments=moments_of(x), **options)

    @staticmethod
    def batch_norm_add_relu(
        x: torch.Tensor, norm: Norm, residual: torch.Tensor, residual_norm: Norm | None = None, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"moments": moments_of(x), "residual_moments": moments_of(residual)}
        return batch_norm_triton.batch_norm_add_relu(x, norm, residual, residual_norm, **given, **options)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs with several tiles each, also at the small shapes here."""
    for name, tile in batch_norm_triton.TILES.items():
        programs = min(tile.programs, 3)
        monkeypatch.setitem(batch_norm_triton.TILES, name, tile._replace(columns=16, elements=128, programs=programs))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(kind, shape, marks=[] if number == 1 or kind == "dual" else pytest.mark.slow)
        for kind in KINDS
        for number, shape in enumerate(SHAPES)
    ],
)
def test_equals_formula(kind: str, shape: tuple[int, ...], small_tiles: None) -> None:
    x, residual = inputs(shape, torch.float32)
    errors = disagreement(run(Triton, kind, x, residual), run(Formula, kind, x.double(), residual.double()))
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("kind", ["plain", "dual", *(pytest.param(k, marks=pytest.mark.slow) for k in ("relu", "add"))])
def test_moments_of_a_convolution_equal_formula(kind: str, small_tiles: None) -> None:
    x, residual = inputs((3, 24, 5, 7), torch.float32)
    errors = disagreement(run(TritonWithMoments, kind, x, residual), run(Formula, kind, x.double(), residual.double()))
    assert max(errors.values()) < 2 * TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_equals_formula(kind: str, dtype: torch.dtype) -> None:
    x, residual = inputs((3, 16, 6, 6), dtype)
    errors = disagreement(run(Triton, kind, x, residual), run(Formula, kind, x.double(), residual.double()))
    assert max(errors.values()) < TOLERANCE[dtype], errors


def test_input_that_is_not_channels_last_gives_the_same() -> None:
    x, residual = inputs((2, 16, 5, 6), torch.float32)
    last = [value.contiguous(memory_format=torch.channels_last) for value in (x, residual)]
    errors = disagreement(run(Triton, "add", x, residual), run(Triton, "add", *last))
    assert max(errors.values()) == 0.0


@pytest.mark.parametrize("used", [0, 1])
def test_one_consumer_of_the_pair_is_enough(used: int) -> None:
    x, residual = inputs((2, 16, 4, 4), torch.float32)
    gradients = []
    for operations, dtype in ((Triton, torch.float32), (Formula, torch.float64)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        pair = operations.batch_norm_add_relu(leaf, parameters(16, 1, dtype), residual.to(dtype))
        pair[used].square().sum().backward()
        gradients.append(leaf.grad.double())
    assert torch.allclose(*gradients, atol=1e-5)


def test_mean_far_from_zero_keeps_the_variance() -> None:
    x, residual = inputs((4, 8, 6, 6), torch.float32)
    x += 1e4
    errors = disagreement(run(Triton, "plain", x, residual), run(Formula, "plain", x.double(), residual.double()))
    assert errors["running_var"] < 1e-5
    assert errors["y"] < 2e-3


@pytest.mark.parametrize("kind", ["plain", "relu", "add", "dual"])
def test_evaluation_equals_the_reference(kind: str) -> None:
    x, residual = inputs((2, 24, 5, 3), torch.float32)
    found = []
    for function, dtype in (
        (batch_norm_triton.batch_norm_evaluate, torch.float32),
        (batch_norm_evaluate_reference, torch.float64),
    ):
        norm, other = parameters(24, 1, dtype), parameters(24, 2, dtype)
        with torch.no_grad():
            y = function(
                x.to(dtype),
                norm,
                relu=kind != "plain",
                residual_NCHW=residual.to(dtype) if kind in ("add", "dual") else None,
                residual_norm=other if kind == "dual" else None,
            )
        found.append(y.double())
    assert torch.allclose(*found, rtol=1e-5, atol=1e-4)
