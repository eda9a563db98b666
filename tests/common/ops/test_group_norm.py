"""Test the reference of group norm against the formula in float64, its layer, and refused requests."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.errors import UnsupportedImplementation
from common.nn.choice import choose
from common.nn.group_norm import GroupNorm, LayerNorm
from common.ops import group_norm
from common.ops.group_norm import apex, group_norm_reference
from common.ops.operation import OperationRequest
from tests.capturable import Capturable
from tests.drawn_tensors import wide


def by_hand(x: np.ndarray, groups: int, weight: np.ndarray, bias: np.ndarray, eps: float, silu: bool) -> np.ndarray:
    """Return the group norm of x, computed for one group of one sample at a time."""
    y = np.empty_like(x)
    width = x.shape[1] // groups
    for sample in range(x.shape[0]):
        for first in range(0, x.shape[1], width):
            own = x[sample, first : first + width]
            y[sample, first : first + width] = (own - own.mean()) / np.sqrt(own.var() + eps)
    z = y * weight[:, None, None] + bias[:, None, None]
    return z / (1 + np.exp(-z)) if silu else z


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("parts", "added"), [((12,), False), ((12,), True), ((8, 4), False)])
def test_group_norm_is_its_formula(parts, added, silu):
    inputs = tuple(wide(2, channels, 3, 5, seed=index) + 2 for index, channels in enumerate(parts))
    weight, bias, moved = wide(12, seed=2), wide(12, seed=3), wide(2, 12, seed=4) if added else None
    x = np.concatenate([value.numpy() for value in inputs], 1) + (
        0 if moved is None else moved.numpy()[..., None, None]
    )
    found = group_norm_reference(inputs, weight, bias, 3, 0.01, silu=silu, added_NC=moved)
    assert isinstance(found, Tensor)
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = by_hand(x, 3, weight.numpy(), bias.numpy(), 0.01, silu)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_group_norm_in_half_precision_rounds_once():
    x, weight, bias = wide(2, 8, 3, 3).half(), wide(8, seed=1).half(), wide(8, seed=2).half()
    found = group_norm_reference((x,), weight, bias, 2, 1e-5, silu=True)
    single = group_norm_reference((x.float(),), weight.float(), bias.float(), 2, 1e-5, silu=True)
    assert isinstance(single, Tensor)
    assert torch.equal(found, single.half())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm_far_from_zero_keeps_its_variance(layout):
    x = (wide(2, 32, 16, 16).float() + 1000).contiguous(memory_format=layout)
    found = group_norm_reference((x,), torch.ones(32), torch.zeros(32), 4, 1e-5, silu=False)
    assert isinstance(found, Tensor)
    expected = by_hand(x.double().numpy(), 4, np.ones(32), np.zeros(32), 1e-5, False)
    assert np.abs(found.numpy() - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("shapes", "groups", "added", "message"),
    [
        ([(2, 8, 3, 3)] * 3, 4, None, "an input or a pair of one size"),
        ([(2, 8, 3, 3), (2, 16, 3, 4)], 4, None, "an input or a pair of one size"),
        ([(2, 20, 3, 3)], 4, None, "24 channels in 4 groups got 20 channels"),
        ([(2, 24, 3, 3)], 5, None, "24 channels in 5 groups got 24 channels"),
        ([(2, 24, 3, 3)], 4, (1, 24), "a value for each of a sample"),
        ([(2, 12, 3, 3)] * 2, 4, (2, 24), "a value for each of a sample"),
    ],
)
def test_what_cannot_be_normalised_is_refused(shapes, groups, added, message):
    inputs = tuple(wide(*shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        group_norm_reference(
            inputs, wide(24), wide(24), groups, 1e-5, silu=False, added_NC=None if added is None else wide(*added)
        )


# The layers


def test_the_layer_takes_one_input_or_a_pair_and_hands_them_on():
    layer = GroupNorm(12, 3, 1e-6, silu=False).double()
    oracle = nn.GroupNorm(3, 12, 1e-6).double()
    assert layer.state_dict().keys() == oracle.state_dict().keys()
    with torch.no_grad():
        layer.weight.copy_(wide(12))
        layer.bias.copy_(wide(12, seed=1))
    oracle.load_state_dict(layer.state_dict())
    first, second, added = wide(2, 8, 3, 3), wide(2, 4, 3, 3, seed=1), wide(2, 12, seed=2)
    x = torch.cat([first, second], 1)
    with Capturable():
        pair, kept = layer(first, second, keep=True)
    assert kept == (first, second)
    torch.testing.assert_close(pair, oracle(x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(layer(x), oracle(x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(layer(x, added=added), oracle(x + added[..., None, None]), rtol=1e-12, atol=1e-13)


def test_layers_say_what_they_chose_and_refuse_what_cannot_be():
    model = nn.Sequential(GroupNorm(32, 16, 1e-5, silu=True), LayerNorm(32))
    assert choose(model, GroupNorm, "auto", torch.float64) == "reference"
    assert choose(model, LayerNorm, "auto", torch.float64) == "reference"
    with pytest.raises(UnsupportedImplementation, match=r"fp16, bf16 or fp32, not torch\.float64"):
        choose(model, GroupNorm, "triton", torch.float64)
    with pytest.raises(UnsupportedImplementation, match=r"fp16, bf16 or fp32, not torch\.float64"):
        choose(model, LayerNorm, "triton", torch.float64)


def test_layer_norm_adds_first_and_is_pytorchs():
    layer, oracle = LayerNorm(6, 1e-5).double(), nn.LayerNorm(6, 1e-5).double()
    with torch.no_grad():
        layer.weight.copy_(wide(6))
        layer.bias.copy_(wide(6, seed=1))
    oracle.load_state_dict(layer.state_dict())
    x, residual, added = wide(4, 6, seed=2), wide(4, 6, seed=3), wide(6, seed=4)
    total, normed = layer(x, residual, added=added)
    torch.testing.assert_close(total, x + residual + added, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(normed, oracle(x + residual + added), rtol=1e-12, atol=1e-13)
    assert layer(x)[0] is x


# apex


def request(device: str = "cuda", dtype: torch.dtype = torch.float16, **sizes: int) -> OperationRequest:
    return OperationRequest(torch.device(device), dtype, {"channels": 320, "groups": 16, **sizes})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(inputs=2), "one input"),
        (request(added=1), "nothing is added"),
        (request(channels=48), "does not know 48 channels in 16 groups"),
        (request(groups=8), "does not know 320 channels in 8 groups"),
        (request(dtype=torch.float64), "fp16, bf16 or fp32"),
        (request("cpu"), "needs a GPU"),
    ],
)
def test_apex_is_refused_what_it_would_leave_to_pytorch(asked, reason):
    with pytest.raises(UnsupportedImplementation, match=reason):
        group_norm.GROUP_NORM.select("apex", asked)


def test_apex_normalises_with_the_parameters_that_it_is_given(monkeypatch):
    """The module of this test has apex's documented constructor. Its own parameters would give other results."""

    class ApexGroupNorm(nn.GroupNorm):
        def __init__(
            self, num_groups: int, num_channels: int, eps: float, affine: bool = True, device: Any = None, act: str = ""
        ) -> None:
            super().__init__(num_groups, num_channels, eps, affine, device=device)
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            assert x.is_contiguous(memory_format=torch.channels_last)
            y = super().forward(x)
            return nn.functional.silu(y) if self.act == "silu" else y

    package, contrib, module = (ModuleType(name) for name in ("apex", "apex.contrib", "apex.contrib.group_norm"))
    module.GroupNorm = ApexGroupNorm  # type: ignore[attr-defined]
    for each in (package, contrib, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    apex._layer.cache_clear()
    x, weight, bias = wide(1, 128, 2, 2).float(), wide(128, seed=1).float(), wide(128, seed=2).float()
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    for silu in (True, False):
        found, (kept,) = apex.group_norm_apex((x,), weight, bias, 16, 1e-6, silu=silu, keep=True)
        expected = group_norm_reference((x,), weight, bias, 16, 1e-6, silu=silu)
        assert kept is x
        torch.testing.assert_close(found, expected)
        dy = wide(1, 128, 2, 2, seed=3).float()
        for given, wanted in zip(
            torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
        ):
            torch.testing.assert_close(given, wanted)
    with pytest.raises(UnsupportedImplementation, match="one input"):
        apex.group_norm_apex((x[:, :64], x[:, 64:]), weight, bias, 16, 1e-6, silu=True)
    apex._layer.cache_clear()
