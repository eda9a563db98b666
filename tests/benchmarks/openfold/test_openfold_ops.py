"""Test the references of OpenFold's operations against PyTorch's operations and plain sums, and special values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.openfold.ops.dropout_add import SharedDropout, dropout_add_reference
from benchmarks.openfold.ops.outer_product_mean import outer_product_mean_reference
from benchmarks.openfold.ops.pair_bias_attention import pair_bias_attention_reference
from benchmarks.openfold.ops.triangle_gate import triangle_gate_reference

SEED = torch.tensor(-0x0123456789ABCDEF)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def existing(*shape: int) -> Tensor:
    """Return a mask with some zeros, but not at the first position."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[..., 0] = True
    return mask


# Attention with a pair bias


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_and_its_gradients_are_those_of_pytorchs_attention_with_an_added_mask(biased, transposed):
    qkvg = drawn(2, 3, 5, 4, 2, 6).requires_grad_()
    gate_bias, bias, exists = drawn(2, 6, seed=3).requires_grad_(), drawn(2, 2, 5, 5, seed=4), existing(2, 3, 5)
    bias = bias.requires_grad_() if biased else None
    given = qkvg.transpose(1, 2).contiguous().transpose(1, 2) if transposed else qkvg
    found = pair_bias_attention_reference(given, gate_bias, exists, bias)
    q, k, v, g = (each.transpose(2, 3) for each in qkvg.unbind(3))
    added = torch.where(exists, 0.0, -math.inf)[:, :, None, None, :]
    added = added if bias is None else added + bias[:, None]
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=added) * torch.sigmoid(g + gate_bias[:, None])
    expected = context.transpose(2, 3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found.transpose(1, 2) if transposed else found).is_contiguous()
    leaves, dy = [each for each in (qkvg, gate_bias, bias) if each is not None], drawn(*expected.shape, seed=5)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_a_row_without_keys_is_finite():
    qkvg, nothing = drawn(1, 1, 4, 4, 1, 8), torch.zeros(1, 1, 4)
    assert pair_bias_attention_reference(qkvg, drawn(1, 8), nothing, None).isfinite().all()


# Triangle multiplication


@pytest.mark.parametrize("outgoing", [True, False])
def test_products_of_the_factors_are_the_sums_over_the_third_residue(outgoing):
    projected, exists = drawn(2 * 5 * 5, 4 * 3), existing(2 * 5 * 5)
    a, b = (each.view(3, 2, 5, 5) for each in triangle_gate_reference(projected, exists))
    found = a @ b.mT if outgoing else a.mT @ b
    projection_a, gate_a, projection_b, gate_b = projected.view(2, 5, 5, 4, 3).unbind(3)
    first = projection_a / (1 + torch.exp(-gate_a)) * exists.view(2, 5, 5, 1)
    second = projection_b / (1 + torch.exp(-gate_b)) * exists.view(2, 5, 5, 1)
    formula = "nikc,njkc->cnij" if outgoing else "nkic,nkjc->cnij"
    torch.testing.assert_close(found, torch.einsum(formula, first, second), rtol=1e-12, atol=1e-12)


# Dropout


def update_alone(dropout: SharedDropout, *shape: int) -> Tensor:
    """Return what is added to a residual of zeros by an update of ones without a gate."""
    return dropout_add_reference(torch.zeros(shape), torch.ones(shape), None, dropout)


@pytest.mark.parametrize(("shared", "axis"), [("rows", 1), ("columns", 2)])
def test_the_mask_is_the_same_along_the_shared_axis_and_keeps_the_mean(shared, axis):
    added = update_alone(SharedDropout(0.25, SEED, 3, shared), 2, 40, 50, 64)
    assert torch.equal(added, added.narrow(axis, 0, 1).expand_as(added))
    assert added.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert added.mean().item() == pytest.approx(1.0, abs=0.03)
    assert not torch.equal(added[0], added[1]), "samples have different masks"


@pytest.mark.parametrize("change", [{"site": 4}, {"seed": torch.tensor(5)}])
def test_other_sites_and_seeds_have_other_masks(change):
    dropout = SharedDropout(0.25, SEED, 3, "rows")
    assert not torch.equal(update_alone(dropout, 1, 1, 9, 8), update_alone(dropout._replace(**change), 1, 1, 9, 8))


@pytest.mark.parametrize(("shared", "axis"), [("rows", 2), ("columns", 1)])
def test_parts_of_the_axis_that_does_not_share_the_mask_have_the_mask_of_the_whole(shared, axis):
    dropout = SharedDropout(0.25, SEED, 3, shared)
    whole = update_alone(dropout, 2, 12, 12, 5)
    for index, part in enumerate(whole.chunk(4, axis)):
        of_part = dropout._replace(first=3 * index, whole=12)
        assert torch.equal(update_alone(of_part, *part.shape), part)


def test_the_gated_update_is_added_to_the_residual():
    residual, update, gate = (drawn(2, 3, 4, 5, seed=seed) for seed in (1, 2, 3))
    dropout = SharedDropout(0.5, SEED, 3, "columns")
    found = dropout_add_reference(residual, update, gate, dropout)
    kept = update_alone(dropout, 2, 3, 4, 5).double()
    torch.testing.assert_close(found, residual + kept * update / (1 + torch.exp(-gate)), rtol=1e-12, atol=1e-12)


def test_without_dropout_the_seed_is_not_read():
    nowhere = torch.empty((), dtype=torch.int64, device="meta")
    x = drawn(1, 2, 3, 4)
    assert torch.equal(dropout_add_reference(x, x, None, SharedDropout(0.0, nowhere, 0, "rows")), 2 * x)


# Outer product mean


def test_the_outer_product_mean_is_its_sum():
    residual, a, b, weight, bias = drawn(2, 3, 4, 6), drawn(2, 5, 3, 2), drawn(2, 5, 4, 2), drawn(6, 4), drawn(6)
    norm = drawn(2, 3, 4).abs() + 1.0
    expected = residual.clone()
    for n, i, j, z in torch.cartesian_prod(*map(torch.arange, residual.shape)).tolist():
        total = bias[z].item()
        for s, c, d in torch.cartesian_prod(*map(torch.arange, (5, 2, 2))).tolist():
            total += (weight[z, 2 * c + d] * a[n, s, i, c] * b[n, s, j, d]).item()
        expected[n, i, j, z] += total / norm[n, i, j]
    found = outer_product_mean_reference(residual, a, b, norm, weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
