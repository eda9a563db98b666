"""Test properties of the Triton attention over edges that cases cannot express.

tests/test_interpreted_kernels.py runs this file. Fresh memory and the parts that a block does not fill hold NaN.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock, Schema
from benchmarks.rgat.ops import edge_attention
from benchmarks.rgat.ops.edge_attention import triton as edge_triton
from benchmarks.rgat.ops.edge_attention.cases import CASES
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.rgat.random_blocks import Inputs, filled, random_block, random_inputs
from tests.capturable import Capturable
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SLOPE = 0.2
ONE = Schema.augmented(("paper",), ("paper__cites__paper",), "paper")


def both_ways(
    inputs: Inputs, block: SampledBlock, level: int, dropout: DropoutMask | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return the results of forward and of backward."""
    options = {"slope": SLOPE, "activation_slope": None, "dropout": dropout}
    terms = inputs.source_term_MA, inputs.target_term_TA
    own = edge_triton.forward(inputs.z_MD, *terms, inputs.bias_RD, block, level, **options)
    gradients = edge_triton.backward(
        inputs.dout_PD, own[0], inputs.z_MD, *terms, own[1], inputs.att_source_RAd, block, level,
        **options, deterministic=True,
    )  # fmt: skip
    return own, gradients


def test_small_tiles_of_several_programs_give_the_same(monkeypatch):
    """Rows span many chunks, and programs write partial sums."""
    monkeypatch.setattr(edge_triton, "CHUNK", 4)
    for key, items in (("gradient", 8), ("targets", 4), ("chunks", 2), ("long_rows", 4)):
        monkeypatch.setitem(edge_triton.TILES, key, edge_triton.TILES[key].replace(items=items, edges=2))
    sizes = {**CASES[2].tests[0], "seeds": 10, "papers": 20, "fanouts": (4, 2, 1), "activation": True, "p": 0.3}
    check(edge_attention.EDGE_ATTENTION, "triton", CASES[2], sizes, torch.float32, torch.device("cpu"))


def test_the_same_bits_twice_and_others_from_another_seed():
    block, seed = random_block(6, schema=ONE, seeds=2, fanouts=(3, 2, 2), slack=1), torch.tensor(1)
    inputs = random_inputs(block, 2, 4, 8, torch.float32)
    dropout = DropoutMask(0.5, seed, 1)
    (out_PD, log_sum_TA), gradients = both_ways(inputs, block, 2, dropout)
    with Capturable():  # tables are on the device by now
        again, gradients_again = both_ways(inputs, block, 2, dropout)
    rows = filled(block, 2).rows
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


def test_an_only_edge_has_no_gradient_of_its_logit():
    """To the bit: its share is 1 whatever the logit, and an optimizer that normalizes would make much of a residue."""
    block = random_block(8, schema=ONE, fanouts=(1, 1, 1), seeds=8, slack=1)
    inputs = random_inputs(block, 3, 4, 8, torch.float32)
    _, (_, dtarget_term_TA, _, datt_source_RAd) = both_ways(inputs, block, 3, None)
    assert block.edge_counts[2, 0] > 3
    assert not dtarget_term_TA.any()
    assert not datt_source_RAd.any()


def test_heads_are_a_power_of_two():
    request = OperationRequest(torch.device("cpu"), torch.float32, {"heads": 3})
    assert edge_attention.EDGE_ATTENTION.select(AUTO, request).name == "reference"
    assert edge_attention.EDGE_ATTENTION.select(AUTO, dataclasses.replace(request, sizes={})).name == "triton"
    block = random_block(9, seeds=2)
    with pytest.raises(ValueError, match="a power of two"):
        both_ways(random_inputs(block, 2, 3, 2, torch.float32), block, 2, None)
