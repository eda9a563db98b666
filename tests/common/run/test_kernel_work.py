"""Bytes and FLOPs of operators against numbers computed by hand, and how kernels of a GPU get them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn import functional as F

from common.run import kernel_work
from common.run.kernel_work import OperatorWork, operator_work

aten = torch.ops.aten


def work(operator, *args, **kwargs):
    """Return bytes and FLOPs of an operator."""
    result = operator(*args, **kwargs)
    return (
        kernel_work.bytes_of(operator, args, kwargs, result),
        kernel_work.flops_of(operator, args, kwargs, result),
    )


def test_a_matrix_product_reads_its_operands_and_writes_its_result():
    a_MK, b_KN = torch.ones(6, 4), torch.ones(4, 5)
    assert work(aten.mm.default, a_MK, b_KN) == (4 * (24 + 20 + 30), 2 * 6 * 4 * 5)
    bias_N = torch.ones(5)
    assert work(aten.addmm.default, bias_N, a_MK, b_KN) == (4 * (5 + 24 + 20 + 30), 2 * 6 * 4 * 5)


def test_a_convolution_has_two_flops_for_each_product():
    x_NCHW, w_OCHW = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    found = work(aten.convolution.default, x_NCHW, w_OCHW, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert found == (4 * (2 * 3 * 64 + 4 * 27 + 2 * 4 * 64), 2 * (2 * 64) * 4 * 27)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_attention_computes_half_of_the_products(causal):
    q_BHSD = torch.randn(1, 2, 16, 8)
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    _, flops = work(operator, q_BHSD, q_BHSD, q_BHSD, 0.0, causal)
    assert flops == 2 * 2 * (2 * 16 * 16 * 8) / (2 if causal else 1)


@pytest.mark.parametrize(
    ("operator", "args", "moved"),
    [
        (aten.add.Tensor, (torch.ones(10), torch.ones(10)), 120),
        (aten.add_.Tensor, (torch.ones(10), torch.ones(10)), 120),
        (aten.copy_.default, (torch.ones(10), torch.ones(10, dtype=torch.float64)), 120),
        (aten.zero_.default, (torch.ones(10),), 40),
        (aten.t.default, (torch.ones(10, 2),), 0),
        (aten.select.int, (torch.ones(10, 2), 0, 3), 0),
        (aten.empty_like.default, (torch.ones(10, 2),), 0),
        (aten.mul.Tensor, (torch.ones(1).expand(10), torch.ones(10)), 84),  # a value that is expanded is read once
        (aten.index_select.default, (torch.ones(1000, 4), 0, torch.tensor([3, 5])), 2 * 32 + 16),
        (aten.index_add_.default, (torch.ones(1000, 4), 0, torch.tensor([3, 5]), torch.ones(2, 4)), 2 * 32 + 32 + 16),
    ],
)
def test_bytes_that_an_operator_must_move(operator, args, moved):
    assert work(operator, *args) == (moved, 0.0)


def test_products_without_a_formula_are_unknown():
    assert work(aten.mv.default, torch.ones(4, 3), torch.ones(3))[1] is None
    assert work(aten.dot.default, torch.ones(3), torch.ones(3))[1] is None


def test_a_step_on_a_cpu_has_the_work_of_its_forward_and_backward_operators():
    x_NK, w_KM = torch.randn(32, 16), torch.randn(16, 8, requires_grad=True)

    def step():
        F.relu(x_NK @ w_KM).sum().backward()

    found = operator_work(step, cuda=False)
    products = [row for row in found if row.flops]
    assert {row.operator for row in products} == {"aten.mm"}
    assert sum(row.flops for row in products) == 2 * (2 * 32 * 16 * 8)  # forward, and the weights' gradient
    assert sum(row.launches for row in products) == 2
    assert {row.precision for row in products} == {"fp32"}
    assert {"aten.relu", "aten.sum", "aten.threshold_backward"} <= {row.operator for row in found}
    assert all(row.ms > 0 for row in found)


def test_kernels_get_the_work_of_the_operator_that_launched_them():
    mark = kernel_work.MARK

    def event(name, parent=None, kernels=(), device=DeviceType.CPU):
        return SimpleNamespace(name=name, cpu_parent=parent, kernels=kernels, device_type=device)

    def kernel(name, us):
        return SimpleNamespace(name=name, duration=us)

    outer = event("Optimizer.step")
    first, second = event(f"{mark}0", outer), event(f"{mark}1", outer)
    convolution = event("aten::convolution", first)
    events = [
        outer,
        first,
        convolution,
        event("aten::cudnn_convolution", convolution, [kernel("to_nhwc", 1000), kernel("conv", 3000)]),
        second,
        event("aten::mm", second, [kernel("gemm", 2000)]),
        event("aten::add", outer, [kernel("unmarked", 500)]),
        event("gemm", None, (), DeviceType.CUDA),
    ]
    calls = {
        0: kernel_work._Call("aten.convolution", 8e6, 4e9, "bf16"),
        1: kernel_work._Call("aten.mm", 6e6, 2e9, "bf16"),
    }
    rows = list(kernel_work._rows(kernel_work._times(events, cuda=True), calls))
    assert rows == [
        OperatorWork("to_nhwc", "aten.convolution", 1, 1.0, 2e6, 1e9, "bf16"),
        OperatorWork("conv", "aten.convolution", 1, 3.0, 6e6, 3e9, "bf16"),
        OperatorWork("gemm", "aten.mm", 1, 2.0, 6e6, 2e9, "bf16"),
    ]
