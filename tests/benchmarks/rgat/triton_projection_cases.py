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
from tests.benchmarks.rgat.projection_oracle import assert_close, case, expected, only_filled, results
from tests.benchmarks.rgat.random_blocks import filled, random_block

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TRITON = projection.PROJECTION.function("triton")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and several splits of a sum, on a device of several multiprocessors."""
    monkeypatch.setattr(projection_triton, "multiprocessors", lambda device: 4)
    for table in (projection_triton.TILES, projection_triton.FP32_TILES):
        for kernel, tile in table.items():
            small = {"rows": 32, "columns": 32, "depth": 16, "stages": 1}
            given = {name: number for name, number in small.items() if name in vars(tile)}
            monkeypatch.setitem(table, kernel, tile.replace(**given))


def block() -> SampledBlock:
    return random_block(2, seeds=11, graph=70)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float16, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
def test_products_of_fp16_are_the_definitions(dtype, exact):
    """With weights in bf16, the inputs are rounded to bf16."""
    given = case(block(), 2, 16, 2, 16, torch.float16, dtype)
    formula, rounded = expected(given)._asdict(), {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    tolerances = {"z": rounded, "input_gradient": rounded, "term": 1e-6, "term_gradient": 1e-6}
    for name, value in only_filled(results(TRITON, given), given).items():
        assert_close(value, formula[name], tolerances.get(name, exact), name)


def test_gradients_too_small_for_fp16_are_not_lost():
    given = case(block(), 2, 16, 2, 8, torch.float16, torch.float16)
    given = given._replace(dterm_TA=given.dterm_TA * 1e-9)
    found = projection_triton.target_terms_gradient(given.x_NK, given.dterm_TA, given.block, 2)
    assert_close(found, expected(given).term_gradient, 1e-6)


def test_the_vectors_of_terms_keep_more_than_the_inputs_bits():
    """bf16 alone would round 1 + 2^-12 to 1."""
    given = case(block(), 2, 16, 1, 8, torch.bfloat16, torch.bfloat16)
    given.v_RKA.fill_(1 + 2**-12)
    term = projection_triton.target_terms(given.x_NK, given.block, 2, given.v_RKA)
    assert_close(term[filled(given.block, 2).targets], expected(given).term, 1e-6)


def test_a_block_in_which_nothing_has_an_edge():
    given = case(random_block(1, without=tuple(range(5)), slack=0), 2, 16, 2, 8, torch.float32, torch.float32)
    found = only_filled(results(TRITON, given), given)
    assert (found["z"].shape, found["source_term"].shape) == ((0, 16), (0, 2))
    assert not found["weight_gradient"].any()
    assert_close(found["input_gradient"], expected(given).input_gradient, 1e-6)


@pytest.mark.parametrize(("sizes", "name"), [((4, 128), "triton"), ((3, 8), "triton"), ((5, 96), "reference")], ids=str)
def test_heads_that_fill_no_tile_are_left_to_pytorch(sizes, name):
    given = {"heads": sizes[0], "head_size": sizes[1]}
    request = OperationRequest(torch.device("cpu"), torch.bfloat16, given)
    assert projection.PROJECTION.select(AUTO, request).name == name
