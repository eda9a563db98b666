"""Attention over edges: the reference against the formula, target by target."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.graph import SampledBlock, Schema
from benchmarks.rgat.ops.block_of_cases import block_of_cases
from benchmarks.rgat.ops.edge_attention.reference import backward_reference, forward_reference
from common.ops.dropout.reference import DropoutMask
from tests.benchmarks.rgat.edge_attention_oracle import defined
from tests.benchmarks.rgat.random_blocks import filled, random_block, random_inputs

HEADS, WIDTH, SLOPE = 2, 3, 0.2
MASK = DropoutMask(0.25, torch.tensor(7), 3)
ONE = Schema.augmented(("paper",), ("paper__cites__paper",), "paper")


def assert_as_defined(
    block: SampledBlock, level: int, activation_slope: float | None = 0.01, dropout: DropoutMask | None = MASK
) -> None:
    inputs = random_inputs(block, level, HEADS, WIDTH)
    options = {"slope": SLOPE, "activation_slope": activation_slope, "dropout": dropout}
    expected_PD, log_sums, gradients = defined(inputs, block, level, SLOPE, activation_slope, dropout)
    terms = inputs.source_term_MA, inputs.target_term_TA
    out_PD, log_sum_TA = forward_reference(inputs.z_MD, *terms, inputs.bias_RD, block, level, **options)
    torch.testing.assert_close(out_PD, expected_PD)
    starts = block.shape.target_offsets(level)
    for (relation, target), log_sum_A in log_sums.items():
        torch.testing.assert_close(log_sum_TA[starts[relation] + target], log_sum_A)
    found = backward_reference(
        inputs.dout_PD, out_PD, inputs.z_MD, *terms, log_sum_TA, inputs.att_source_RAd, block, level,
        **options, deterministic=True,
    )  # fmt: skip
    rows = filled(block, level).rows
    torch.testing.assert_close(found[0][rows], gradients["z_MD"][rows])
    for tensor, name in zip(found[1:], ("target_term_TA", "bias_RD", "att_source_RAd"), strict=True):
        torch.testing.assert_close(tensor, gradients[name])


@pytest.mark.parametrize("level", [1, 2, 3])
def test_both_ways_are_what_the_formula_gives(level):
    assert_as_defined(random_block(), level)


@pytest.mark.parametrize("activation_slope", [None, 0.01])
@pytest.mark.parametrize("dropout", [None, MASK._replace(p=0.0), MASK])
def test_with_and_without_activation_and_dropout(activation_slope, dropout):
    assert_as_defined(random_block(1), 2, activation_slope, dropout)


@pytest.mark.parametrize("without", [(0,), (1, 3), (0, 1, 2, 3, 4)])
def test_a_relation_without_edges_gives_its_bias(without):
    assert_as_defined(random_block(2, without=without), 2)


def test_one_relation_of_one_type():
    assert_as_defined(random_block(3, schema=ONE), 3)


def test_the_block_has_isolated_targets_and_duplicate_edges_and_a_full_one_works():
    block = random_block(4, graph=5, slack=0)
    pairs, isolated, several = set(), 0, 0
    for relation, start in enumerate(block.shape.edge_offsets[:-1]):
        for edge in range(start, start + int(block.edge_counts[-1, relation])):
            pair = relation, int(block.edge_row[edge]), int(block.edge_target[edge])
            several += pair in pairs
            pairs.add(pair)
        degrees = block.indptr[slice(*block.shape.indptr_offsets[relation : relation + 2])].diff()
        isolated += int((degrees == 0).sum())
    assert several
    assert isolated
    assert_as_defined(block, 3)


def test_rows_of_the_block_of_the_cases_are_nodes_of_their_level():
    block = block_of_cases(torch.device("cpu"), 3, 300)
    shape = block.shape
    assert int((block.edge_counts[-1] > 0).sum()) > 8
    for relation, source in enumerate(shape.schema.sources):
        first, into = shape.row_offsets(shape.hops)[relation], shape.node_row_offsets[relation]
        for level in range(1, shape.hops + 1):
            count = int(block.row_counts[level - 1, relation])
            node = block.rows[first : first + count]
            edges = block.edge_row[shape.edge_offsets[relation] :][: int(block.edge_counts[level - 1, relation])]
            assert set(edges.tolist()) == set(range(count))
            assert ((node >= 0) & (node < block.node_counts[level, source])).all()
            if level < shape.hops:
                assert torch.equal(block.node_row[into + node.long()], torch.arange(count, dtype=torch.int32))
