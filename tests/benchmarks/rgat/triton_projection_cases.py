"""Test the Triton products of R-GAT with special values and with dtypes that the cases do not have.

tests/test_interpreted_kernels.py runs this file. Fresh memory and the unfilled parts of inputs hold NaN.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.projection import triton as projection_triton
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.rgat.projection_oracle import assert_close, case, expected
from tests.benchmarks.rgat.random_blocks import filled, random_block

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and several splits of a sum, on a device of several multiprocessors."""
    monkeypatch.setattr(projection_triton, "multiprocessors", lambda device: 4)
    for table in (projection_triton.TILES, projection_triton.WIDE_TILES):
        for kernel, tile in table.items():
            small = {"rows": 32, "columns": 32, "depth": 16, "stages": 1}
            given = {name: number for name, number in small.items() if name in vars(tile)}
            monkeypatch.setitem(table, kernel, tile.replace(**given))


def block() -> SampledBlock:
    return random_block(2, seeds=11, graph=70)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float16, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
def test_products_of_fp16_are_the_definitions(dtype: torch.dtype, exact: float) -> None:
    """With weights in bf16, the inputs are rounded to bf16."""
    given = case(block(), 2, 16, 2, 16, torch.float16, dtype)
    (own, level, x_NK, weight, att, v, dz_MD, dterm_TA), formula = given, expected(given)
    there, rounded = filled(own, level), {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    z, source_term = projection_triton.project(x_NK, own, level, weight, att)
    assert_close(z[there.rows], formula.z, rounded)
    assert_close(source_term[there.rows], formula.source_term, exact)
    assert_close(
        projection_triton.weight_gradient(x_NK, dz_MD, own, level, torch.float32), formula.weight_gradient, exact
    )
    assert_close(projection_triton.target_terms(x_NK, own, level, v)[there.targets], formula.term, 1e-6)
    assert_close(projection_triton.target_terms_gradient(x_NK, dterm_TA, own, level), formula.term_gradient, 1e-6)
    dx = projection_triton.input_gradient(dz_MD, dterm_TA, own, level, weight, v)
    assert_close(dx[there.nodes], formula.input_gradient, rounded)


def test_gradients_too_small_for_fp16_are_not_lost() -> None:
    given = case(block(), 2, 16, 2, 8, torch.float16, torch.float16)
    given = given._replace(dterm_TA=given.dterm_TA * 1e-9)
    found = projection_triton.target_terms_gradient(given.x_NK, given.dterm_TA, given.block, 2)
    assert_close(found, expected(given).term_gradient, 1e-6)


def test_the_vectors_of_terms_keep_more_than_the_inputs_bits() -> None:
    """Of 1 + 2^-12, bf16 alone would make 1."""
    given = case(block(), 2, 16, 1, 8, torch.bfloat16, torch.bfloat16)
    given.v_RKA.fill_(1 + 2**-12)
    term = projection_triton.target_terms(given.x_NK, given.block, 2, given.v_RKA)
    assert_close(term[filled(given.block, 2).targets], expected(given).term, 1e-6)


def test_a_block_in_which_nothing_has_an_edge() -> None:
    given = case(random_block(1, without=tuple(range(5)), slack=0), 2, 16, 2, 8, torch.float32, torch.float32)
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
