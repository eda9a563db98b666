"""Test the references of GEGLU and of LayerNorm after addition: formulas in float64, and rounding."""

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from common.ops.add_layer_norm import add_layer_norm_reference
from common.ops.geglu import geglu_reference
from tests.drawn_tensors import wide


def test_geglu_is_the_value_times_the_gate_times_its_normal_probability():
    x, bias = wide(7, 10) * 3, wide(10, seed=1)
    z = (x + bias).numpy()
    value, gate = z[:, :5], z[:, 5:]
    np.testing.assert_allclose(geglu_reference(x, bias).numpy(), value * gate * ndtr(gate), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(geglu_reference(x + bias, None), geglu_reference(x, bias))


def test_geglu_in_half_precision_rounds_once():
    x, bias = wide(5, 6).half(), wide(6, seed=1).half()
    assert torch.equal(geglu_reference(x, bias), geglu_reference(x.float(), bias.float()).half())


@pytest.mark.parametrize("parts", ["neither", "added", "residual", "both"])
def test_add_layer_norm_is_its_formula(parts):
    x, weight, bias = wide(5, 6), wide(6, seed=1), wide(6, seed=2)
    added = wide(6, seed=3) if parts in ("added", "both") else None
    residual = wide(5, 6, seed=4) if parts in ("residual", "both") else None
    total = x.numpy() + (0 if added is None else added.numpy()) + (0 if residual is None else residual.numpy())
    centred = total - total.mean(1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 0.01)
    found_sum, found_norm = add_layer_norm_reference(x, residual, weight, bias, 0.01, added_C=added)
    np.testing.assert_allclose(found_sum.numpy(), total, rtol=1e-15)
    np.testing.assert_allclose(found_norm.numpy(), normal * weight.numpy() + bias.numpy(), rtol=1e-12, atol=1e-13)


def test_add_layer_norm_normalises_the_sum_as_it_was_rounded():
    x, residual, weight, bias, added = (
        t.bfloat16() for t in (wide(5, 6), wide(5, 6, seed=1), wide(6, seed=2), wide(6, seed=3), wide(6, seed=4))
    )
    total, normed = add_layer_norm_reference(x, residual, weight, bias, 1e-5, added_C=added)
    assert torch.equal(total, (x.float() + added.float() + residual.float()).bfloat16())
    again, same = add_layer_norm_reference(total, None, weight, bias, 1e-5)
    assert again is total
    assert torch.equal(normed, same)
