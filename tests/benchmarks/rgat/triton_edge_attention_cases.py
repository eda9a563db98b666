"""Triton's attention over edges against the reference; run by tests/test_interpreted_kernels.py.

Fresh memory holds NaN here, and so does whatever a block does not fill.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.block import Block
from benchmarks.rgat.ops import edge_attention
from benchmarks.rgat.ops.edge_attention import triton as edge_triton
from benchmarks.rgat.ops.edge_attention.reference import backward_reference, forward_reference
from benchmarks.rgat.schema import Schema
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.rgat.random_edges import Inputs, filled, random_block, random_inputs
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SLOPE = 0.2
MASK = DropoutMask(0.25, torch.tensor(7), 3)
ONE = Schema.augmented(("paper",), ("paper__cites__paper",), "paper")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2}}


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that rows go on through chunks and programs leave something to add up."""
    monkeypatch.setattr(edge_triton, "CHUNK", 4)
    for key, items in (("gradient", 8), ("targets", 4), ("chunks", 2), ("long_rows", 4)):
        monkeypatch.setitem(edge_triton.TILES, key, edge_triton.TILES[key]._replace(items=items, edges=2))


def both_ways(
    functions: edge_attention.EdgeAttention,
    inputs: Inputs,
    block: Block,
    level: int,
    activation_slope: float | None = 0.01,
    dropout: DropoutMask | None = MASK,
    result: tuple[Tensor, Tensor] | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Results of forward, and of backward for the ``result`` of forward, if it is not to be its own."""
    options = {"slope": SLOPE, "activation_slope": activation_slope, "dropout": dropout}
    terms = inputs.source_term_MA, inputs.target_term_TA
    own = functions.forward(inputs.z_MD, *terms, inputs.bias_RD, block, level, **options)
    out_PD, log_sum_TA = own if result is None else result
    gradients = functions.backward(
        inputs.dout_PD, out_PD, inputs.z_MD, *terms, log_sum_TA, inputs.att_source_RAd, block, level,
        **options, deterministic=True,
    )  # fmt: skip
    return own, gradients


PLAIN = edge_attention.EdgeAttention(forward_reference, backward_reference)
TRITON = edge_attention.EdgeAttention(edge_triton.forward, edge_triton.backward)


def assert_as_plain(
    block: Block,
    level: int,
    activation_slope: float | None = 0.01,
    dropout: DropoutMask | None = MASK,
    *,
    heads: int = 4,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
) -> None:
    inputs = random_inputs(block, level, heads, width, dtype)
    expected, expected_gradients = both_ways(PLAIN, inputs, block, level, activation_slope, dropout)
    found, gradients = both_ways(TRITON, inputs, block, level, activation_slope, dropout, expected)
    assert found[0].dtype == gradients[0].dtype == dtype
    torch.testing.assert_close(found[0], expected[0], **TOLERANCE[dtype])
    there = expected[1] > -torch.inf
    torch.testing.assert_close(found[1][there], expected[1][there])
    rows = filled(block, level, "rows")
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        if gradient is gradients[0]:
            gradient, expected_gradient = gradient[rows], expected_gradient[rows]
        else:
            assert gradient.dtype == torch.float32
        scale = max(1.0, expected_gradient.abs().sum().item() / max(expected_gradient.numel(), 1))
        torch.testing.assert_close(gradient / scale, expected_gradient / scale, **TOLERANCE[dtype])


def small_block(seed: int, **options: Any) -> Block:
    return random_block(seed, **{"seeds": 2, "fanouts": (3, 2, 2), "slack": 1, **options})


ALSO_SLOW = pytest.mark.slow


@pytest.mark.parametrize("level", [pytest.param(1, marks=ALSO_SLOW), 2, pytest.param(3, marks=ALSO_SLOW)])
def test_both_ways_are_the_references(level: int) -> None:
    block = small_block(5)
    assert block.edge_counts[level - 1].sum() > 5 * level
    assert_as_plain(block, level)


@pytest.mark.parametrize(
    ("activation_slope", "dropout"),
    [(None, None), pytest.param(0.01, None, marks=ALSO_SLOW), pytest.param(None, MASK, marks=ALSO_SLOW)],
)
def test_bf16_with_and_without_activation_and_dropout(
    activation_slope: float | None, dropout: DropoutMask | None
) -> None:
    assert_as_plain(small_block(1, schema=ONE), 3, activation_slope, dropout, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("heads", "width"), [(1, 3), pytest.param(2, 128, marks=ALSO_SLOW), pytest.param(8, 1, marks=ALSO_SLOW)]
)
def test_other_heads_and_widths(heads: int, width: int) -> None:
    assert_as_plain(small_block(3, schema=ONE), 2, heads=heads, width=width)


@pytest.mark.parametrize("without", [(0, 3), pytest.param((0, 1, 2, 3, 4), marks=ALSO_SLOW)])
def test_relations_without_edges(without: tuple[int, ...]) -> None:
    assert_as_plain(small_block(4, without=without), 2)


@pytest.mark.slow
def test_one_relation_without_room_to_spare() -> None:
    assert_as_plain(random_block(5, schema=ONE, slack=0), 3)


@pytest.mark.parametrize("level", [1, pytest.param(3, marks=ALSO_SLOW)])
def test_rows_with_many_edges(level: int) -> None:
    """Lists that go on through several chunks, of which a lower level counts the first entries only."""
    block = random_block(6, schema=ONE, seeds=5, fanouts=(5, 5, 2), hub=0.8, slack=1)
    longest = block.row_indptr.diff().max()
    counted = (block.edge_row[: int(block.edge_counts[level - 1, 0])] == block.edge_row[0]).sum()
    assert 8 < counted <= longest
    assert (counted < longest) == (level == 1)
    assert_as_plain(block, level, heads=2, width=4)


def test_the_same_bits_twice_and_others_from_another_seed() -> None:
    block, seed = small_block(6, schema=ONE), torch.tensor(1)
    inputs = random_inputs(block, 2, 4, 8, torch.float32)
    dropout = DropoutMask(0.5, seed, 1)
    (out_PD, log_sum_TA), gradients = both_ways(TRITON, inputs, block, 2, None, dropout)
    with Capturable():  # tables are on the device by now
        again, gradients_again = both_ways(TRITON, inputs, block, 2, None, dropout)
    rows = filled(block, 2, "rows")
    assert torch.equal(out_PD, again[0])
    assert torch.equal(log_sum_TA.nan_to_num(), again[1].nan_to_num())
    assert torch.equal(gradients[0][rows], gradients_again[0][rows])
    assert all(torch.equal(one, other) for one, other in zip(gradients[1:], gradients_again[1:], strict=True))
    seed.fill_(2)
    options = {"slope": SLOPE, "activation_slope": None, "dropout": dropout}
    others_PD, _ = edge_triton.forward(
        inputs.z_MD, inputs.source_term_MA, inputs.target_term_TA, inputs.bias_RD, block, 2, **options
    )
    assert not torch.equal(out_PD == 0, others_PD == 0)


def test_an_only_edge_has_no_gradient_of_its_logit() -> None:
    """To the bit: its share is 1 whatever the logit, and an optimizer that normalizes would make much of a residue."""
    block = random_block(8, schema=ONE, fanouts=(1, 1, 1), seeds=8, slack=1)
    inputs = random_inputs(block, 3, 4, 8, torch.float32)
    _, (_, dtarget_term_TA, _, datt_source_RAd) = both_ways(TRITON, inputs, block, 3)
    assert block.edge_counts[2, 0] > 3
    assert not dtarget_term_TA.any()
    assert not datt_source_RAd.any()


def test_heads_are_a_power_of_two() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32, {"heads": 3})
    assert edge_attention.EDGE_ATTENTION.select(AUTO, request).name == "reference"
    assert edge_attention.EDGE_ATTENTION.select(AUTO, dataclasses.replace(request, sizes={})).name == "triton"
    block = random_block(9, seeds=2)
    with pytest.raises(ValueError, match="a power of two"):
        both_ways(TRITON, random_inputs(block, 2, 3, 2, torch.float32), block, 2)
