"""Test operations of Transformer Engine where it is not installed: refusals, and behaviour without the package."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from common import optional_packages
from common.errors import UnsupportedImplementation
from common.ops.attention import ATTENTION
from common.ops.attention import te as te_attention
from common.ops.linear import LINEAR, Linear
from common.ops.linear.te import TeProduct
from common.ops.operation import OperationRequest

SIZES = {"columns": 64, "head_dim": 64}


def refusal(operation, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> str:
    with pytest.raises(UnsupportedImplementation) as refused:
        operation.select("te", OperationRequest(torch.device(device), dtype, SIZES | sizes))
    return str(refused.value)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a supported GPU without optional packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = "{0.name} is not installed"
    monkeypatch.setattr(optional_packages, "_import_all", reason.format)
    return monkeypatch


@pytest.mark.parametrize("operation", [ATTENTION, LINEAR], ids=lambda found: found.name)
def test_it_needs_a_gpu_and_the_package(operation, hopper):
    assert "needs a CUDA device, not cpu" in refusal(operation, "cpu")
    assert "transformer-engine is not installed" in refusal(operation)


@pytest.mark.parametrize("operation", [ATTENTION, LINEAR], ids=lambda found: found.name)
def test_it_takes_16_bits(operation, hopper):
    assert re.search("not (of )?torch.float32", refusal(operation, dtype=torch.float32))


def test_sizes_and_gpus_that_it_does_not_take(hopper):
    assert "40 columns are not a multiple of 16" in refusal(LINEAR, columns=40)
    for head_dim in (60, 136):
        assert f"up to 128, not {head_dim}" in refusal(ATTENTION, head_dim=head_dim)
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "need compute capability 8.9" in refusal(LINEAR)
    assert "needs compute capability 9.0" in refusal(ATTENTION)


def test_auto_keeps_the_precision_and_our_attention(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(optional_packages, "_import_all", lambda package: None)
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, SIZES)
    assert LINEAR.select("auto", request).name == "reference"
    assert ATTENTION.select("auto", request).name == "triton"
    assert LINEAR.select("te", request).name == "te"
    assert ATTENTION.select("te", request).name == "te"


def test_sequences_anywhere_become_bounds_with_absent_ones_behind_the_last():
    starts, lengths = torch.tensor([20, 3, 0, 11, 0]), torch.tensor([5, 7, 0, 9, 0])
    sums, firsts = te_attention._bounds(starts, lengths, 32)
    assert sums.tolist() == [0, 5, 12, 12, 21, 21]
    assert firsts.tolist() == [20, 3, 32, 11, 32, 32]
    assert sums.dtype == firsts.dtype == torch.int32


def test_a_layers_weight_and_rows_are_multiples_of_16():
    with pytest.raises(UnsupportedImplementation, match="40 x 64 can't be multiplied in FP8"):
        TeProduct(torch.empty(40, 64))
    weight = torch.empty(32, 64, requires_grad=True)
    for rows in (0, 24):
        with pytest.raises(UnsupportedImplementation, match=f"a product of {rows} rows"):
            TeProduct(weight)(torch.empty(rows, 64), weight, None)


def test_without_gradients_products_are_pytorchs_and_no_scale_moves():
    layer = Linear(64, 32)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    layer.product = TeProduct(layer.weight)
    x, before = torch.randn(5, 64), layer.product.scales.clone()
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer.product.scales, before)


def test_a_checkpoint_has_scales_alone_and_they_stay_in_fp32():
    layer = Linear(64, 32)
    layer.product = TeProduct(layer.weight.detach().bfloat16())
    assert set(layer.state_dict()) == {"weight", "bias", "product.scales"}
    layer.bfloat16()
    assert layer.product.scales.tolist() == [1.0, 1.0, 65536.0]
    assert layer.product.scales.dtype == layer.product.amaxes.dtype == torch.float32
    assert TeProduct(torch.empty(32, 64, dtype=torch.float16)).scales.tolist() == [1.0, 1.0, 1.0]
