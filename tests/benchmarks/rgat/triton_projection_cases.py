"""Triton's products of R-GAT against the definition in float64; run by tests/test_interpreted_kernels.py. Tensors that
the kernels must fill are poisoned first, and what is not filled of their inputs holds NaN."""

from __future__ import annotations

import pytest
import torch
from random_rows import ROOM, case, expected, filled, random_block
from torch import Tensor

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.projection import triton as projection_triton
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TERM_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 2e-5, torch.float8_e4m3fn: 2e-5}
CASES = [
    (3, 24, 3, 8, torch.float32, torch.float32),
    (1, 32, 2, 16, torch.float32, torch.float32),
    (2, 20, 3, 16, torch.float8_e4m3fn, torch.bfloat16),
    (2, 16, 2, 24, torch.bfloat16, torch.bfloat16),
    (2, 16, 2, 16, torch.float16, torch.float16),
    pytest.param((3, 40, 4, 32, torch.float8_e4m3fn, torch.bfloat16), marks=pytest.mark.slow),
    pytest.param((2, 64, 4, 16, torch.float16, torch.bfloat16), marks=pytest.mark.slow),
]
"""Level, inputs, heads, head size, dtype of the inputs and of the weight."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and several splits of a sum, on a device of several multiprocessors."""
    monkeypatch.setattr(projection_triton, "multiprocessors", lambda device: 4)
    for table in (projection_triton.TILES, projection_triton.WIDE_TILES):
        for kernel, tile in table.items():
            monkeypatch.setitem(table, kernel, tile._replace(rows=32, columns=32, depth=16, stages=1))


def assert_close(found: Tensor, formula: Tensor, tolerance: float) -> None:
    error = (found.double() - formula).norm() / formula.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("given", CASES, ids=str)
def test_products_and_gradients_are_the_definitions(
    given: tuple[int, int, int, int, torch.dtype, torch.dtype], full: bool
) -> None:
    level, inputs, heads, head_size, x_dtype, dtype = given
    block = random_block(level, full=full)
    x_NK, weight, att, v, dz_MD, dterm_TA = case(block, level, inputs, heads, head_size, x_dtype, dtype)[2:]
    formula = expected(case(block, level, inputs, heads, head_size, x_dtype, dtype))
    there, tolerance = filled(block, level), TOLERANCE[dtype]
    # fp16 has bits that the product's bf16 loses
    exact = tolerance if (x_dtype, dtype) == (torch.float16, torch.bfloat16) else 1e-6

    z, source_term = projection_triton.project(x_NK, block, level, weight, att)
    assert (z.dtype, source_term.dtype) == (dtype, torch.float32)
    assert_close(z[there.rows], formula.z, tolerance)
    assert_close(source_term[there.rows], formula.source_term, exact)

    dweight = projection_triton.weight_gradient(x_NK, dz_MD, block, level, torch.float32)
    assert dweight.dtype == torch.float32
    assert_close(dweight, formula.weight_gradient, exact)
    assert (dweight[formula.weight_gradient.sum((1, 2)) == 0] == 0).all()
    assert projection_triton.weight_gradient(x_NK, dz_MD, block, level, dtype).dtype == dtype

    term = projection_triton.target_terms(x_NK, block, level, v)
    assert term.dtype == torch.float32
    assert_close(term[there.targets], formula.term, TERM_TOLERANCE[x_dtype])
    dv = projection_triton.target_terms_gradient(x_NK, dterm_TA, block, level)
    assert_close(dv, formula.term_gradient, TERM_TOLERANCE[x_dtype])

    if level < ROOM.hops:
        dx = projection_triton.input_gradient(dz_MD, dterm_TA, block, level, weight, v)
        assert dx.dtype == dtype
        assert_close(dx[there.nodes], formula.input_gradient, tolerance)


def test_gradients_too_small_for_fp16_are_not_lost() -> None:
    given = case(random_block(2), 2, 16, 2, 8, torch.float16, torch.float16)
    given = given._replace(dterm_TA=given.dterm_TA * 1e-9)
    found = projection_triton.target_terms_gradient(given.x_NK, given.dterm_TA, given.block, 2)
    assert_close(found, expected(given).term_gradient, 1e-6)


def test_the_vectors_of_terms_keep_more_than_the_inputs_bits() -> None:
    """Of 1 + 2^-12, bf16 alone would make 1."""
    given = case(random_block(2), 2, 16, 1, 8, torch.bfloat16, torch.bfloat16)
    given.v_RKA.fill_(1 + 2**-12)
    term = projection_triton.target_terms(given.x_NK, given.block, 2, given.v_RKA)
    assert_close(term[filled(given.block, 2).targets], expected(given).term, 1e-6)


def test_a_block_in_which_nothing_has_an_edge() -> None:
    shape = BlockShape(ROOM.schema, ROOM.nodes, ROOM.edges, ((0,) * 5,) * 3)
    given = case(random_block(1, shape), 2, 16, 2, 8, torch.float32, torch.float32)
    z, source_term = projection_triton.project(given.x_NK, given.block, 2, given.weight_RKD, given.att_source_RAd)
    assert z.shape == (0, 16)
    assert source_term.shape == (0, 2)
    dweight = projection_triton.weight_gradient(given.x_NK, given.dz_MD, given.block, 2, torch.float32)
    assert (dweight == 0).all()
    dx = projection_triton.input_gradient(given.dz_MD, given.dterm_TA, given.block, 2, given.weight_RKD, given.v_RKA)
    assert_close(dx[filled(given.block, 2).nodes], expected(given).input_gradient, 1e-6)


@pytest.mark.parametrize(("sizes", "name"), [((4, 128), "triton"), ((3, 8), "triton"), ((5, 96), "reference")], ids=str)
def test_heads_that_fill_no_tile_are_left_to_pytorch(sizes: tuple[int, int], name: str) -> None:
    given = {"heads": sizes[0], "head_size": sizes[1]}
    request = OperationRequest(torch.device("cpu"), torch.bfloat16, given)
    assert projection.PROJECTION.select(AUTO, request).name == name


def test_many_heads_of_any_size_are_whole_in_every_tile() -> None:
    given = case(random_block(2), 2, 16, 8, 12, torch.float32, torch.float32)
    found = projection_triton.project(given.x_NK, given.block, 2, given.weight_RKD, given.att_source_RAd)
    rows = filled(given.block, 2).rows
    assert_close(found.source_term_MA[rows], expected(given).source_term, 1e-6)
