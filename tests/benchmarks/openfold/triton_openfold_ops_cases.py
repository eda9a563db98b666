"""Test kernels of OpenFold where cases of the operations cannot. tests/test_interpreted_kernels.py runs this file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.openfold.ops.dropout_add import SharedDropout, dropout_add_reference
from benchmarks.openfold.ops.dropout_add.triton import dropout_add
from benchmarks.openfold.ops.pair_bias_attention import PAIR_BIAS_ATTENTION, kernels, pair_bias_attention_reference
from benchmarks.openfold.ops.pair_bias_attention import triton as attention
from common.ops.catalogue import cases_of
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

CPU = torch.device("cpu")


@pytest.mark.parametrize("tile", [{"queries": 16, "keys": 32}, {"queries": 32, "keys": 16}], ids=["16x32", "32x16"])
def test_other_tiles_give_what_the_reference_does(tile: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, default in attention.TILES.items():
        monkeypatch.setitem(attention.TILES, name, default.replace(**tile))
    case = cases_of(PAIR_BIAS_ATTENTION)[0]
    sizes = {"samples": 1, "rows": 2, "positions": 37, "heads": 1, "head_size": 16}
    check(PAIR_BIAS_ATTENTION, "triton", case, sizes, torch.bfloat16, CPU)


def test_a_row_without_keys_has_the_mean_of_the_values() -> None:
    qkvg = torch.randn(1, 2, 5, 4, 1, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gate_bias, exists = torch.zeros(1, 8), torch.tensor([[[0.0] * 5, [1.0] * 5]])
    found = attention.pair_bias_attention(qkvg, gate_bias, exists, None)
    expected = pair_bias_attention_reference(qkvg, gate_bias, exists, None)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), qkvg)
    assert gradient.isfinite().all()


def test_a_bias_without_gradient_needs_no_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> None:
        raise AssertionError("the gradient of the bias is not needed")

    monkeypatch.setattr(kernels, "pair_bias_attention_bias_gradient_kernel", {(1, 1, 1): launch})
    qkvg = torch.randn(1, 1, 5, 4, 1, 8).requires_grad_()
    found = attention.pair_bias_attention(qkvg, torch.zeros(1, 8), torch.ones(1, 1, 5), torch.randn(1, 1, 5, 5))
    found.sum().backward()
    assert qkvg.grad is not None


def test_parts_of_an_axis_have_the_masks_of_the_whole() -> None:
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    dropout = SharedDropout(0.5, torch.tensor(5), 9, "rows")
    expected = dropout_add_reference(x, x, None, dropout)
    for index, part in enumerate(x.chunk(3, 2)):
        part = part.contiguous()
        found = dropout_add(part, part, None, dropout._replace(first=2 * index, whole=6))
        assert torch.equal(found, expected.chunk(3, 2)[index])
