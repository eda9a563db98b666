"""Triton operations of an encoder that write FP8, on a GPU: against the references in float64, and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops import attention, bias_gelu, dropout_add_norm
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Handover, Scaling, computed_reference
from tests.fp8_oracle import assert_same_fp8, codes

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("scale", [0.0, 3.7], ids=["first use", "later use"])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.full((), scale, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda"))


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(6)]
    del held


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert expected is not None
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def bytes_of(x8: Fp8Tensor) -> list[Tensor]:
    matrices = [x for x in (x8.data, x8.transposed) if x is not None]
    return [x.view(torch.uint8) for x in matrices] + [x8.scale_inverse]


def follows_its_inputs(step: Callable[[list[Scaling]], list[Tensor]], states: int, change: Callable[[], Any]) -> None:
    """What is captured gives in every replay what eager code does, and leaves the same scales."""
    ours, eager = ([scaling() for _ in range(states)] for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([scaling() for _ in range(states)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(ours)
        for state in ours:  # nothing ran while it was captured
            assert not state.scale
        for _ in range(4):
            change()
            graph.replay()
            for found, expected in zip(captured, step(eager), strict=True):
                assert torch.equal(found, expected)
        assert [state.scale.item() for state in ours] == [state.scale.item() for state in eager]


class GeluCase:
    """Inputs of GELU, and its results in FP8 with those."""

    def __init__(self, tokens: int, features: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.x = (random(tokens, features, dtype=dtype) * 2).requires_grad_()
        self.bias = random(features, seed=1, dtype=dtype).requires_grad_()
        self.dy = random(tokens, features, seed=2, dtype=dtype)

    def results(
        self, function: Callable[..., Any], to: torch.dtype, states: tuple[Scaling, Scaling]
    ) -> tuple[Fp8Tensor, Fp8Tensor, Tensor]:
        """The result, the gradient of x, and that of the bias, of inputs in dtype ``to``."""
        x, bias = (leaf.detach().to(to).requires_grad_() for leaf in (self.x, self.bias))
        handover = Handover(states[1])
        y8 = function(x, bias, fp8=states[0], handover=handover)
        _, d_bias = torch.autograd.grad(y8.source, (x, bias), self.dy.to(to))
        dx8 = handover.take()
        assert isinstance(y8, Fp8Tensor)
        assert dx8 is not None
        return y8, dx8, d_bias


@DTYPES
@SCALES
@pytest.mark.parametrize("shape", [(3008, 4096), (48, 1040), (16, 16)])
def test_gelu_and_its_gradient_in_fp8_equal_float64(shape: tuple[int, int], scale: float, dtype: torch.dtype) -> None:
    case = GeluCase(*shape, dtype)
    ours, wide = ((scaling(scale), scaling(100 * scale)) for _ in range(2))
    poison()
    y8, dx8, d_bias = case.results(bias_gelu.BIAS_GELU.function("triton"), dtype, ours)
    expected = case.results(bias_gelu.BIAS_GELU.reference, torch.float64, wide)
    assert_same_fp8(y8, ours[0], expected[0], wide[0], dtype)
    assert_same_fp8(dx8, ours[1], expected[1], wide[1], dtype)
    assert_close(d_bias, expected[2], dtype)


def test_gelu_in_a_graph_follows_its_inputs_and_scales() -> None:
    case, function = GeluCase(2048, 4096), bias_gelu.BIAS_GELU.function("triton")

    def step(states: list[Scaling]) -> list[Tensor]:
        y8, dx8, d_bias = case.results(function, torch.bfloat16, (states[0], states[1]))
        return [*bytes_of(y8), *bytes_of(dx8), d_bias]

    follows_its_inputs(step, 2, lambda: case.x.data.mul_(1.5))


class NormCase:
    """Inputs of dropout, residual and norm, and its results in FP8 with those."""

    def __init__(self, tokens: int, features: int, dtype: torch.dtype = torch.bfloat16) -> None:
        shapes = ((tokens, features), (features,), (tokens, features), (features,), (features,))
        self.inputs = [random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
        self.dys = [random(tokens, features, seed=seed, dtype=dtype) for seed in (5, 6)]
        self.seed = torch.tensor(8, device="cuda")

    def results(
        self, function: Callable[..., Any], to: torch.dtype, states: tuple[Scaling, Scaling]
    ) -> tuple[Fp8Tensor, Fp8Tensor, list[Tensor]]:
        """The result and the gradient of x in FP8; the result and the other gradients."""
        leaves = [given.detach().to(to).requires_grad_() for given in self.inputs]
        handover, mask = Handover(states[1]), DropoutMask(0.1, self.seed, 2)
        y8, y = function(*leaves, 1e-12, mask, twice=True, fp8=states[0], handover=handover)
        gradients = torch.autograd.grad([y8.source, y], leaves, [dy.to(to) for dy in self.dys])
        dx8 = handover.take()
        assert isinstance(y8, Fp8Tensor)
        assert dx8 is not None
        return y8, dx8, [y, *gradients[1:]]


@DTYPES
@SCALES
@pytest.mark.parametrize("shape", [(3008, 1024), (48, 528), (16, 16)])
def test_norm_and_its_gradient_in_fp8_equal_float64(shape: tuple[int, int], scale: float, dtype: torch.dtype) -> None:
    case = NormCase(*shape, dtype)
    ours, wide, again = ((scaling(scale), scaling(100 * scale)) for _ in range(3))
    poison()
    y8, dx8, others = case.results(dropout_add_norm.DROPOUT_ADD_NORM.function("triton"), dtype, ours)
    _, expected_dx8, expected = case.results(dropout_add_norm.DROPOUT_ADD_NORM.reference, torch.float64, wide)
    assert_same_fp8(dx8, ours[1], expected_dx8, wide[1], dtype)
    for found, reference in zip(others, expected, strict=True):
        assert_close(found, reference, dtype)
    of_result = computed_reference(others[0].detach().float(), again[0], E4M3, dtype)
    assert torch.equal(y8.data.view(torch.uint8), of_result.data.view(torch.uint8))
    assert torch.equal(ours[0].scale, again[0].scale)


def test_norm_in_a_graph_follows_its_inputs_and_scales() -> None:
    case, function = NormCase(2048, 1024), dropout_add_norm.DROPOUT_ADD_NORM.function("triton")

    def step(states: list[Scaling]) -> list[Tensor]:
        y8, dx8, others = case.results(function, torch.bfloat16, (states[0], states[1]))
        return [*bytes_of(y8), *bytes_of(dx8), *others]

    def change() -> None:
        case.seed.add_(1)
        for dy in case.dys:
            dy.mul_(1.5)

    follows_its_inputs(step, 2, change)


class AttentionCase:
    """Inputs of attention, and its gradients with those."""

    lengths = (512, 1, 5, 63, 64, 65, 300, 211, 0, 0)
    tokens = 1280

    def __init__(self, dtype: torch.dtype) -> None:
        self.qkv = random(self.tokens, 3, 16, 64, dtype=dtype)
        self.bias = random(3 * 16 * 64, seed=1, dtype=dtype)
        self.d_context = random(self.tokens, 16, 64, seed=2, dtype=dtype) * 1e-4
        self.d_context[sum(self.lengths) :] = 0
        ends = torch.tensor(self.lengths).cumsum(0)
        self.starts, self.each = (ends - torch.tensor(self.lengths)).int().cuda(), torch.tensor(self.lengths).cuda()
        self.seed = torch.tensor(3, device="cuda")

    def results(self, name: str, to: torch.dtype, state: Scaling | None) -> tuple[Fp8Tensor | None, Tensor, Tensor]:
        """The gradient of qkv in FP8 if there is a scale, what autograd has of it, and that of the bias."""
        qkv, bias = (given.detach().to(to).requires_grad_() for given in (self.qkv, self.bias))
        handover, mask = Handover(state), DropoutMask(0.1, self.seed, 2)
        function = attention.ATTENTION.function(name)
        context = function(qkv, self.starts, self.each, 512, mask, bias, handover=handover)
        d_qkv, d_bias = torch.autograd.grad(context, (qkv, bias), self.d_context.to(to))
        return handover.take(), d_qkv, d_bias


@SCALES
def test_the_gradient_of_attention_in_fp8_equals_float64(scale: float) -> None:
    """In fp32: of 16-bit factors' products, small differences would be compared."""
    case, ours, wide = AttentionCase(torch.float32), scaling(1e6 * scale), scaling(1e6 * scale)
    poison()
    found, _, d_bias = case.results("triton", torch.float32, ours)
    expected, _, expected_d_bias = case.results("reference", torch.float64, wide)
    # sums over 512 keys in fp32 are off by some 1e-6 of the largest, a quarter of which parts two codes
    assert_same_fp8(found, ours, expected, wide, torch.float32, noise=1e-5)
    assert (d_bias.double() - expected_d_bias).norm() < 1e-5 * expected_d_bias.norm()


@DTYPES
def test_the_gradient_of_attention_in_fp8_is_that_in_16_bits_but_for_rounding(dtype: torch.dtype) -> None:
    case, state, again = AttentionCase(dtype), scaling(1e6), scaling(1e6)
    found, _, d_bias = case.results("triton", dtype, state)
    _, d_qkv, expected_d_bias = case.results("triton", dtype, None)
    expected = computed_reference(d_qkv.float().flatten(1), again, E5M2, dtype)
    assert found is not None
    # Between products 16 bits hold probabilities and their gradients, tile by tile: what nearly cancels differs.
    sizes = d_qkv.flatten(1).float().abs()
    large = sizes >= max(0.1 * float(sizes.square().mean().sqrt()), torch.finfo(dtype).tiny)
    assert large.sum() > 0.5 * large.numel()
    assert (codes(found) - codes(expected))[large].abs().max() <= 1
    assert (d_bias - expected_d_bias).float().norm() < torch.finfo(dtype).eps * expected_d_bias.float().norm()
    torch.testing.assert_close(state.scale, again.scale, rtol=1e-2, atol=0)


def test_attention_in_a_graph_follows_its_inputs_and_scales() -> None:
    case = AttentionCase(torch.bfloat16)

    def step(states: list[Scaling]) -> list[Tensor]:
        found, _, d_bias = case.results("triton", torch.bfloat16, states[0])
        assert found is not None
        return [*bytes_of(found), d_bias]

    def change() -> None:
        case.seed.add_(1)
        case.d_context.mul_(1.5)

    follows_its_inputs(step, 1, change)
