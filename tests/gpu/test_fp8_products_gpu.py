"""Test FP8 products and attention of Transformer Engine on a GPU: against float64, in sequence, and captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from common.ops import attention
from common.ops.cases import Draw
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast import triton as fp8_cast_triton
from common.ops.fp8_cast.reference import E4M3, E5M2, cast_reference
from common.ops.libraries import TRANSFORMER_ENGINE
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, Fp8LinearProduct
from common.ops.linear.te import TeProduct
from common.ops.operation import OperationRequest
from tests import fp8_oracle as oracle
from tests.gpu.support import CAPABILITY, GPU, WITH_FP8, captured, relative_error

pytestmark = [pytest.mark.gpu, WITH_FP8]

TE_MISSING = "needs a Hopper GPU or newer" if CAPABILITY < (9, 0) else TRANSFORMER_ENGINE.unavailable()
WITH_TE = pytest.mark.skipif(TE_MISSING is not None, reason=str(TE_MISSING))
PRODUCTS = pytest.mark.parametrize("kind", [Fp8LinearProduct, pytest.param(TeProduct, marks=WITH_TE)])
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
    """Return the context, and the gradients of qkv and bias."""
    function = attention.ATTENTION.function(name)
    leaves = [x.detach().clone().requires_grad_() for x in (qkv, bias)]
    mask = DropoutMask(p, torch.tensor(1, device="cuda"), 0)
    poison()
    context = function(leaves[0], *sequences(), LENGTH, mask, leaves[1])
    return [context.detach(), *torch.autograd.grad(context, leaves, d_context)]


def inside() -> Tensor:
    """Return whether each row belongs to a sequence."""
    rows = torch.zeros(TOKENS, dtype=torch.bool, device="cuda")
    for start, length in zip(STARTS, LENGTHS, strict=True):
        rows[start : start + length] = True
    return rows


@WITH_TE
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
        assert relative_error(value, reference) < 2 * TOLERANCE[dtype]
    assert not found[0][~inside()].any()
    assert not found[1][~inside()].any()


def uniform_attention() -> tuple[Tensor, Tensor]:
    """Return qkv and bias. Probabilities are equal and value j is unit vector j, so the context shows what was kept."""
    qkv = torch.zeros(TOKENS, 3, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    start, length = STARTS[4], LENGTHS[4]
    assert length == HEAD_DIM
    qkv[start : start + length, 2] = torch.eye(HEAD_DIM, device="cuda").unsqueeze(1)
    return qkv, torch.zeros(3 * HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")


@WITH_TE
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
    assert relative_error(dqkv[own, 2], dv) < 2 * TOLERANCE[torch.bfloat16]


@WITH_TE
def test_masks_follow_the_generator_of_pytorch() -> None:
    qkv, bias = uniform_attention()
    d_context = random(TOKENS, HEADS, HEAD_DIM)
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first, second = (attend("te", qkv, bias, d_context, 0.1)[0] for _ in range(2))
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(attend("te", qkv, bias, d_context, 0.1)[0], first)


@WITH_TE
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
        assert relative_error(found[0], expected.detach()) < 2 * TOLERANCE[torch.bfloat16]
        assert relative_error(found[1], gradient) < 2 * TOLERANCE[torch.bfloat16]
    for _ in range(2):
        graph.replay()
        kept.append(found[2].clone())
    assert not torch.equal(*kept)


def test_many_uses_in_a_row_each_take_the_scale_of_the_one_before() -> None:
    """If a program replaced the scale before another one has read it, bytes would be wrong."""
    draw = Draw(GPU, torch.bfloat16)
    inputs = [torch.randn(8192, 1024, device="cuda").mul(2.0**i).to(torch.bfloat16) for i in range(4)]
    scales = [float(oracle.scale_of(x.float().abs().max().item(), E4M3)) for x in inputs]
    state = draw.scaling(scales[3])
    casts = [fp8_cast_triton.cast(inputs[use % 4], state, E4M3, False) for use in range(100)]
    expected = [cast_reference(inputs[i], draw.scaling(scales[i - 1]), E4M3, False) for i in range(4)]
    for use, found in enumerate(casts):
        assert torch.equal(found.scale_inverse, expected[use % 4].scale_inverse)
        assert torch.equal(found.data.view(torch.uint8), expected[use % 4].data.view(torch.uint8))


class Problem:
    """One layer with operands on the GPU."""

    def __init__(
        self,
        kind: type[Fp8LinearProduct | TeProduct],
        tokens: int,
        columns: int,
        rows: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.weight = (random(rows, columns, dtype=torch.float32) * 0.02).to(dtype).requires_grad_()
        self.bias = random(rows, dtype=dtype, seed=1).requires_grad_()
        self.x = random(tokens, columns, dtype=dtype, seed=2).requires_grad_()
        self.dy = (random(tokens, rows, dtype=torch.float32, seed=3) * 1e-3).to(dtype)
        self.product = kind(self.weight)

    def step(self) -> list[Tensor]:
        """Return the result, and the gradients of x, weight and bias."""
        y = self.product(self.x, self.weight, self.bias)
        return [y.detach(), *torch.autograd.grad(y, (self.x, self.weight, self.bias), self.dy)]

    def amaxes(self) -> list[float]:
        return [tensor.detach().float().abs().max().item() for tensor in (self.x, self.weight, self.dy)]

    def expected(self, scales: list[float]) -> list[np.ndarray]:
        """Return the results of :meth:`step` at these scales, in float64."""
        x = oracle.quantised(self.x.cpu(), np.float32(scales[INPUT]), E4M3)
        weight = oracle.quantised(self.weight.cpu(), np.float32(scales[WEIGHT]), E4M3)
        dy = oracle.quantised(self.dy.cpu(), np.float32(scales[GRADIENT]), E5M2)
        bias = self.bias.detach().double().cpu().numpy()
        return [x @ weight.T + bias, dy @ weight, dy.T @ x, self.dy.double().cpu().numpy().sum(0)]


@PRODUCTS
@DTYPES
@pytest.mark.parametrize("sizes", [(512, 1024, 3072), (1024, 4096, 1024), (48, 64, 32)])
def test_products_equal_float64_products_of_quantised_operands(
    sizes: tuple[int, int, int], dtype: torch.dtype, kind: type[Fp8LinearProduct | TeProduct]
) -> None:
    problem = Problem(kind, *sizes, dtype)
    problem.step()
    scales = problem.product.scales.tolist()  # of these very tensors, so the next use takes them again
    for index, (value, expected) in enumerate(zip(problem.step(), problem.expected(scales), strict=True)):
        assert value.dtype == dtype
        error = np.linalg.norm(value.double().cpu().numpy() - expected) / np.linalg.norm(expected)
        assert error < 5e-3, f"tensor {index}: relative error {error:.2e}"
    if isinstance(problem.product, TeProduct):
        wanted = [oracle.scale_of(a, to) for a, to in zip(problem.amaxes(), (E4M3, E4M3, E5M2), strict=True)]
        np.testing.assert_allclose(problem.product.scales.cpu().numpy(), wanted, rtol=1e-6)
        assert not problem.product.amaxes.any()


@WITH_TE
def test_a_tensor_of_zeros_leaves_its_scale() -> None:
    problem = Problem(TeProduct, 64, 64, 32)
    problem.step()
    before = problem.product.scales.clone()
    problem.dy.zero_()
    _, dx, dw, _ = problem.step()
    assert not dx.any()
    assert not dw.any()
    assert torch.equal(problem.product.scales, before)


@PRODUCTS
def test_captured_products_equal_eager_ones_use_by_use(kind: type[Fp8LinearProduct | TeProduct]) -> None:
    eager, other = Problem(kind, 512, 256, 384), Problem(kind, 512, 256, 384)
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
