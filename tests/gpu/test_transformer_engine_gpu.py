"""Transformer Engine on a GPU: attention within packs and FP8 products against float64, in graphs, without waiting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from common.ops import attention
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import E4M3, E5M2
from common.ops.libraries import TRANSFORMER_ENGINE
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT
from common.ops.linear.te import TeProduct
from common.ops.operation import OperationRequest
from tests import fp8_oracle as oracle

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper GPU or newer", allow_module_level=True)
MISSING = TRANSFORMER_ENGINE.unavailable()
if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
HEADS, HEAD_DIM, LENGTH = 4, 64, 512
# in any order, with absent ones and rows of no sequence between them
STARTS = (0, 1000, 0, 513, 590, 655, 0, 1330)
LENGTHS = (512, 300, 0, 1, 64, 65, 0, 211)
TOKENS = 1600


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda().to(dtype)


def sequences() -> tuple[Tensor, Tensor]:
    starts, lengths = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (STARTS, LENGTHS))
    return starts, lengths


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(6)]
    del held


def attend(name: str, qkv: Tensor, bias: Tensor, d_context: Tensor, p: float = 0.0) -> list[Tensor]:
    """Context, and the gradients of qkv and bias."""
    function = attention.ATTENTION.function(name)
    leaves = [x.detach().clone().requires_grad_() for x in (qkv, bias)]
    mask = DropoutMask(p, torch.tensor(1, device="cuda"), 0)
    poison()
    context = function(leaves[0], *sequences(), LENGTH, mask, leaves[1])
    return [context.detach(), *torch.autograd.grad(context, leaves, d_context)]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


def inside() -> Tensor:
    """Whether a row is a sequence's."""
    rows = torch.zeros(TOKENS, dtype=torch.bool, device="cuda")
    for start, length in zip(STARTS, LENGTHS, strict=True):
        rows[start : start + length] = True
    return rows


@DTYPES
def test_attention_equals_float64(dtype: torch.dtype) -> None:
    request = OperationRequest(torch.device("cuda"), dtype, {"head_dim": HEAD_DIM})
    assert attention.ATTENTION.unsupported("te", request) is None
    qkv, bias = random(TOKENS, 3, HEADS, HEAD_DIM, dtype=dtype), random(3 * HEADS * HEAD_DIM, dtype=dtype, seed=1)
    qkv[~inside()] = float("nan")
    d_context = random(TOKENS, HEADS, HEAD_DIM, dtype=dtype, seed=2)
    found = attend("te", qkv, bias, d_context)
    expected = attend("reference", qkv.nan_to_num().double(), bias.double(), d_context.double())
    for value, reference in zip(found, expected, strict=True):
        assert_close(value, reference, 2 * TOLERANCE[dtype])
    assert not found[0][~inside()].any()
    assert not found[1][~inside()].any()


def uniform_attention() -> tuple[Tensor, Tensor]:
    """A qkv whose probabilities are equal, and whose value j is unit vector j: the context shows what was kept."""
    qkv = torch.zeros(TOKENS, 3, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    start, length = STARTS[4], LENGTHS[4]
    assert length == HEAD_DIM
    qkv[start : start + length, 2] = torch.eye(HEAD_DIM, device="cuda").unsqueeze(1)
    return qkv, torch.zeros(3 * HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")


def test_dropout_keeps_its_share_and_backward_drops_the_same() -> None:
    p, (qkv, bias) = 0.25, uniform_attention()
    own = slice(STARTS[4], STARTS[4] + LENGTHS[4])
    d_context = random(TOKENS, HEADS, HEAD_DIM, seed=3)
    torch.cuda.manual_seed(5)
    context, dqkv, _ = attend("te", qkv, bias, d_context, p)
    kept = context[own] != 0
    assert 1 - kept.float().mean().item() == pytest.approx(p, abs=0.015)  # 16,384 draws: 0.0034 is one deviation
    torch.testing.assert_close(
        context[own][kept].float(),
        torch.full_like(context[own][kept], 1 / HEAD_DIM / (1 - p)).float(),
        rtol=0.01,
        atol=0,
    )
    dv = torch.einsum("qhk,qhd->khd", context[own].double(), d_context[own].double())
    assert_close(dqkv[own, 2], dv, 2 * TOLERANCE[torch.bfloat16])


def test_masks_follow_the_generator_of_pytorch() -> None:
    qkv, bias = uniform_attention()
    d_context = random(TOKENS, HEADS, HEAD_DIM)
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first, second = (attend("te", qkv, bias, d_context, 0.1)[0] for _ in range(2))
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(attend("te", qkv, bias, d_context, 0.1)[0], first)


def captured(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of ``function`` behind one call of it, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = function()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, found


def test_attention_in_a_graph_follows_its_inputs_and_draws_anew() -> None:
    function = attention.ATTENTION.function("te")
    qkv = random(TOKENS, 3, HEADS, HEAD_DIM).requires_grad_()
    d_context, seed = random(TOKENS, HEADS, HEAD_DIM, seed=2), torch.tensor(1, device="cuda")
    starts, lengths = sequences()

    def both(p: float) -> list[Tensor]:
        context = function(qkv, starts, lengths, LENGTH, DropoutMask(p, seed, 0), None)
        return [context.detach(), *torch.autograd.grad(context, [qkv], d_context)]

    graph, found = captured(lambda: [*both(0.0), *both(0.1)])
    kept: list[Tensor] = []
    for replay in range(2):
        with torch.no_grad():
            qkv.copy_(random(*qkv.shape, seed=10 + replay))
        lengths[1] = 100 * (1 + replay)
        graph.replay()
        wide = qkv.detach().double().requires_grad_()
        expected = attention.ATTENTION.reference(wide, starts, lengths, LENGTH, DropoutMask(0.0, seed, 0), None)
        (gradient,) = torch.autograd.grad(expected, wide, d_context.double())
        assert_close(found[0], expected.detach(), 2 * TOLERANCE[torch.bfloat16])
        assert_close(found[1], gradient, 2 * TOLERANCE[torch.bfloat16])
    for _ in range(2):
        graph.replay()
        kept.append(found[2].clone())
    assert not torch.equal(*kept)


class Problem:
    """One layer with operands on the GPU."""

    def __init__(self, tokens: int, columns: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weight = (random(rows, columns, dtype=torch.float32) * 0.02).to(dtype).requires_grad_()
        self.bias = random(rows, dtype=dtype, seed=1).requires_grad_()
        self.x = random(tokens, columns, dtype=dtype, seed=2).requires_grad_()
        self.dy = (random(tokens, rows, dtype=torch.float32, seed=3) * 1e-3).to(dtype)
        self.product = TeProduct(self.weight)

    def step(self) -> list[Tensor]:
        """The result, and the gradients of x, weight and bias."""
        y = self.product(self.x, self.weight, self.bias)
        return [y.detach(), *torch.autograd.grad(y, (self.x, self.weight, self.bias), self.dy)]

    def amaxes(self) -> list[float]:
        return [tensor.detach().float().abs().max().item() for tensor in (self.x, self.weight, self.dy)]

    def expected(self, scales: list[float]) -> list[np.ndarray]:
        """What :meth:`step` gives at these scales, in float64."""
        x = oracle.quantised(self.x.cpu(), np.float32(scales[INPUT]), E4M3)
        weight = oracle.quantised(self.weight.cpu(), np.float32(scales[WEIGHT]), E4M3)
        dy = oracle.quantised(self.dy.cpu(), np.float32(scales[GRADIENT]), E5M2)
        bias = self.bias.detach().double().cpu().numpy()
        return [x @ weight.T + bias, dy @ weight, dy.T @ x, self.dy.double().cpu().numpy().sum(0)]


@DTYPES
@pytest.mark.parametrize("sizes", [(512, 1024, 3072), (1024, 4096, 1024), (48, 64, 32)])
def test_products_equal_float64_products_of_quantised_operands(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    problem = Problem(*sizes, dtype)
    for _ in range(2):
        scales = problem.product.scales.tolist()
        for index, (value, reference) in enumerate(zip(problem.step(), problem.expected(scales), strict=True)):
            assert value.dtype == dtype
            error = np.linalg.norm(value.double().cpu().numpy() - reference) / np.linalg.norm(reference)
            assert error < 5e-3, f"tensor {index}: relative error {error:.2e}"
        wanted = [oracle.scale_of(a, to) for a, to in zip(problem.amaxes(), (E4M3, E4M3, E5M2), strict=True)]
        np.testing.assert_allclose(problem.product.scales.cpu().numpy(), wanted, rtol=1e-6)
        assert not problem.product.amaxes.any()


def test_a_tensor_of_zeros_leaves_its_scale() -> None:
    problem = Problem(64, 64, 32)
    problem.step()
    before = problem.product.scales.clone()
    problem.dy.zero_()
    _, dx, dw, _ = problem.step()
    assert not dx.any()
    assert not dw.any()
    assert torch.equal(problem.product.scales, before)


def test_products_in_a_graph_equal_eager_ones_use_by_use() -> None:
    eager, other = Problem(512, 256, 384), Problem(512, 256, 384)
    graph, found = captured(other.step)
    other.product.scales.copy_(eager.product.scales)
    for use in range(3):
        with torch.no_grad():
            for problem in (eager, other):
                problem.x.mul_(2.0**use)
        expected = eager.step()
        graph.replay()
        for value, reference in zip(found, expected, strict=True):
            assert torch.equal(value, reference)
        assert torch.equal(other.product.scales, eager.product.scales)


def test_nothing_waits_for_the_device() -> None:
    problem = Problem(512, 256, 128)
    qkv = random(TOKENS, 3, HEADS, HEAD_DIM).requires_grad_()
    bounds, mask = sequences(), DropoutMask(0.1, torch.tensor(1, device="cuda"), 0)

    def both() -> None:
        problem.step()
        context = attention.ATTENTION.function("te")(qkv, *bounds, LENGTH, mask, None)
        torch.autograd.grad(context, [qkv], context)

    both()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
