"""The reference of the cross network against its formula."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cross_network_oracle import expected, inputs

from benchmarks.dlrm_dcnv2.ops.cross_network import apply, cross_network_reference, gradient_reference


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_result_and_gradients_are_the_formulas(layers):
    given = inputs(5, 12, 4, layers, torch.float64)
    leaves = [leaf.requires_grad_() for leaf in given.leaves()]
    y = cross_network_reference(given.x0, given.v, given.w, given.b)
    for mine, formula in zip([y, *torch.autograd.grad(y, leaves, given.dy)], expected(given), strict=True):
        torch.testing.assert_close(mine, formula)


def test_a_sample_by_hand():
    """x1 = x0 * (W (V x0) + b) + x0 with x0 = (1, 2), V = (3, -1), W = (2, 5)^T, b = (4, -3)."""
    x0 = torch.tensor([[1.0, 2.0]])
    v, w, b = torch.tensor([[3.0, -1.0]]), torch.tensor([[2.0], [5.0]]), torch.tensor([4.0, -3.0])
    assert cross_network_reference(x0, [v], [w], [b]).tolist() == [[1 * (2 * 1 + 4) + 1, 2 * (5 * 1 - 3) + 2]]


def test_gradients_of_a_layer_are_final_before_the_layers_before_it_are_differentiated():
    given, seen = inputs(3, 4, 2, 3, torch.float32), []

    def gradient(*arguments: Any) -> tuple[torch.Tensor, ...]:
        seen.append("layer")
        return gradient_reference(*arguments)

    for kind, leaves in (("v", given.v), ("w", given.w), ("b", given.b)):
        for number, leaf in enumerate(leaves):
            leaf.requires_grad_().register_post_accumulate_grad_hook(lambda _, of=f"{kind}{number}": seen.append(of))
    apply(gradient, given.x0, given.v, given.w, given.b).backward(given.dy)
    parts = [set(part) for found, part in itertools.groupby(seen, lambda name: name == "layer") if not found]
    assert parts == [{"v2", "w2", "b2"}, {"v1", "w1", "b1"}, {"v0", "w0", "b0"}]


def test_the_gradient_that_is_given_is_not_written_over():
    given = inputs(3, 4, 2, 2, torch.float32)
    before = given.dy.clone()
    leaves = [leaf.requires_grad_() for leaf in given.leaves()]
    torch.autograd.grad(cross_network_reference(given.x0, given.v, given.w, given.b), leaves, given.dy)
    assert torch.equal(given.dy, before)


def test_an_x0_that_needs_no_gradient():
    given = inputs(3, 4, 2, 2, torch.float64)
    parameters = [leaf.requires_grad_() for leaf in given.leaves()[1:]]
    y = cross_network_reference(given.x0, given.v, given.w, given.b)
    for mine, formula in zip(torch.autograd.grad(y, parameters, given.dy), expected(given)[2:], strict=True):
        torch.testing.assert_close(mine, formula)


def test_nothing_is_kept_for_an_evaluation():
    given, kept = inputs(3, 4, 2, 2, torch.float32), []
    [leaf.requires_grad_() for leaf in given.leaves()]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda none: None):
        with torch.no_grad():
            cross_network_reference(given.x0, given.v, given.w, given.b)
        assert kept == []
        cross_network_reference(given.x0, given.v, given.w, given.b)
    assert len(kept) == 6 * 2
