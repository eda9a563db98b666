"""The plain dot interaction against loops over pairs."""

import pytest
import torch
from dot_interaction_oracle import expected, inputs

from benchmarks.dlrm.ops.dot_interaction import dot_interaction_reference


@pytest.mark.parametrize(("vectors", "columns"), [(27, 360), (3, 11), (3, 16), (1, 8)])
def test_result_and_gradient_are_those_of_the_loops(vectors, columns):
    x, dy = inputs(4, vectors, 8, columns, torch.float64)
    y = dot_interaction_reference(x.requires_grad_(), columns)
    for mine, formula in zip([y, *torch.autograd.grad(y, x, dy)], expected(x, dy), strict=True):
        torch.testing.assert_close(mine, formula)


def test_pairs_come_row_by_row():
    """(1, 0), (2, 0), (2, 1), (3, 0), ... of vectors of one element, which are primes."""
    x = torch.tensor([2.0, 3.0, 5.0, 7.0]).view(1, 4, 1)
    assert dot_interaction_reference(x, 8).tolist() == [[2, 6, 10, 15, 14, 21, 35, 0]]


def test_columns_that_do_not_hold_the_result_are_refused():
    with pytest.raises(ValueError, match="the interaction of 27 vectors of 128 has 479 columns, not 478"):
        dot_interaction_reference(torch.zeros(1, 27, 128), 478)
