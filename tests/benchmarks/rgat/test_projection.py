"""The plain products of R-GAT against their definition in float64, and which requests are refused."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.projection.reference import Projection
from tests.benchmarks.rgat.projection_oracle import Case, assert_close, case, expected, only_filled, results
from tests.benchmarks.rgat.random_blocks import random_block

PLAIN: Projection = projection.PROJECTION.function("reference")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HALVES = [(torch.float8_e4m3fn, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
TYPES = [(torch.float64, torch.float64), (torch.float32, torch.float32), *HALVES]


def small(seed: int, level: int, x_dtype: torch.dtype, dtype: torch.dtype, *, full: bool = False) -> Case:
    """Without unused rows, or with a relation without rows."""
    block = random_block(seed, seeds=11, graph=70, slack=0 if full else 3, without=() if full else (4,))
    return case(block, level, 24, 3, 8, x_dtype, dtype)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_products_and_gradients_are_those_of_the_definition(types, level, full):
    given = small(level, level, *types, full=full)
    formula, wide = expected(given)._asdict(), torch.promote_types(types[1], torch.float32)
    dtypes = {"z": types[1], "weight_gradient": torch.float32, "input_gradient": types[1]}
    found = only_filled(results(PLAIN, given), given)
    for name, value in found.items():
        assert value.dtype == dtypes.get(name, wide), name
        tolerance = TOLERANCE[wide if name.startswith("term") else types[1]]
        assert_close(value, formula[name], max(tolerance, TOLERANCE[value.dtype]), name)
    assert not found["weight_gradient"][formula["weight_gradient"].sum((1, 2)) == 0].any()


def test_inputs_of_another_level_are_refused():
    given = small(0, 2, torch.float32, torch.float32)
    for level in (1, 3):
        with pytest.raises(ValueError, match=f"level {level} holds at most"):
            PLAIN.project(given.x_NK, given.block, level, given.weight_RKD, given.att_source_RAd)
    with pytest.raises(ValueError, match="the block has 3 hops"):
        PLAIN.target_terms(given.x_NK, given.block, 4, given.v_RKA)
    with pytest.raises(ValueError, match="dz has 5 rows"):
        PLAIN.weight_gradient(given.x_NK, given.dz_MD[:5], given.block, 2, torch.float32)
    with pytest.raises(ValueError, match="levels 1 to 2 of 3 hops"):
        PLAIN.input_gradient(given.dz_MD, given.dterm_TA, given.block, 3, given.weight_RKD, given.v_RKA)
