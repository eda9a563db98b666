"""Kernels of a GPU are linked to PyTorch's operators and to the cases of operations."""

from __future__ import annotations

import pytest
import torch

from common.ops.dropout_add_norm import DROPOUT_ADD_NORM
from common.run.kernel_work import case_work, operator_work

pytestmark = pytest.mark.gpu

SIDE = 2048


def test_kernels_of_a_step_have_the_work_of_their_operators():
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def step():
        torch.relu(a @ b).sum().backward()

    step()
    found = operator_work(step, cuda=True)
    products = [row for row in found if row.operator == "aten.mm"]
    assert sum(row.flops for row in products) == pytest.approx(3 * 2 * SIDE**3)  # forward and two gradients
    assert {row.precision for row in products} == {"bf16"}
    assert all(row.ms > 0 and row.kernel and not row.kernel.startswith("aten") for row in found)
    assert any(row.operator == "aten.relu" and row.bytes == 4 * SIDE**2 for row in found)


def test_cases_of_an_operation_name_its_kernels():
    found = case_work("BERT", {"dropout_add_norm": DROPOUT_ADD_NORM}, {"dropout_add_norm": "triton"})
    own = [case for case in found if case.operation == DROPOUT_ADD_NORM.name]
    assert {case.direction for case in own} >= {"forward", "backward"}
    assert [case.failure for case in found] == [""] * len(found)
    assert all(any("dropout_add_norm" in name for name in case.kernels) for case in own)
    assert all(case.bytes > 0 and sum(case.kernels.values()) > 0 for case in own)
