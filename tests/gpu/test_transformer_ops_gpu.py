"""Test that one CUDA graph of a transformer's Triton operations gives the right bits for all batches and scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import attention, bias_gelu, dropout_add_norm
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling
from tests.gpu.captures import follows_its_inputs

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FP8 = pytest.mark.parametrize(
    "fp8",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 units")
        ),
    ],
    ids=["16 bits", "FP8"],
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def parts(x8: Fp8Tensor | None) -> list[Tensor]:
    """Return the bytes and the scale of an FP8 tensor."""
    return [] if x8 is None else [x8.data.view(torch.uint8), x8.scale_inverse]


@FP8
def test_attention_in_one_graph_serves_every_batch(fp8: bool) -> None:
    batches = iter([(512, 1, 5, 63, 64, 65, 300, 211, 0, 0), (100, 512, 3, 0, 0, 0, 0, 0, 0, 0), (0,) * 10])
    function = attention.ATTENTION.function("triton")
    qkv, bias = random(1288, 3, 4, 64).requires_grad_(), random(3 * 4 * 64, seed=1).requires_grad_()
    d_context = random(1288, 4, 64, seed=2) * 1e-4
    starts, lengths = (torch.zeros(10, dtype=torch.int32, device="cuda") for _ in range(2))
    seed = torch.tensor(1, device="cuda")

    def step(states: list[Scaling]) -> list[Tensor]:
        handover = Handover(states[0] if fp8 else None)
        context = function(qkv, starts, lengths, 512, DropoutMask(0.1, seed, 3), bias, handover=handover)
        d_qkv, d_bias = torch.autograd.grad(context, (qkv, bias), d_context)
        return [context, d_bias, *(parts(handover.take()) if fp8 else [d_qkv])]

    def change() -> None:
        now = torch.tensor(next(batches))
        lengths.copy_(now)
        starts.copy_(torch.where(now > 0, now.cumsum(0) - now, 0))
        seed.add_(1)
        d_context.mul_(1.5)

    first, second, nothing = follows_its_inputs(step, change, 2)
    assert not torch.equal(first, second)
    assert nothing.eq(0).all()


@FP8
def test_norm_for_two_readers_in_a_graph_follows_its_inputs_and_scales(fp8: bool) -> None:
    shapes = ((3008, 1024), (1024,), (3008, 1024), (1024,), (1024,))
    inputs = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    d_results = [random(3008, 1024, seed=seed) for seed in (5, 6)]
    seed, norm = torch.tensor(8, device="cuda"), dropout_add_norm.DROPOUT_ADD_NORM.function("triton")

    def step(states: list[Scaling]) -> list[Tensor]:
        handover, mask = Handover(states[1] if fp8 else None), DropoutMask(0.1, seed, 2)
        first, second = norm(*inputs, 1e-12, mask, twice=True, fp8=states[0] if fp8 else None, handover=handover)
        source = first.source if fp8 else first
        d_x, *others = torch.autograd.grad([source, second], inputs, d_results)
        return [second, *others, *(parts(first) + parts(handover.take()) if fp8 else [d_x])]

    def change() -> None:
        seed.add_(1)
        d_results[1].mul_(-2)

    follows_its_inputs(step, change, 2)


@FP8
def test_gelu_in_a_graph_follows_its_inputs_and_scales(fp8: bool) -> None:
    x, bias, dy = random(2048, 4096).requires_grad_(), random(4096, seed=1).requires_grad_(), random(2048, 4096, seed=2)
    gelu = bias_gelu.BIAS_GELU.function("triton")

    def step(states: list[Scaling]) -> list[Tensor]:
        handover = Handover(states[1] if fp8 else None)
        y = gelu(x, bias, fp8=states[0] if fp8 else None, handover=handover)
        d_x, d_bias = torch.autograd.grad(y.source if fp8 else y, (x, bias), dy)
        return [d_bias, *(parts(y) + parts(handover.take()) if fp8 else [y, d_x])]

    follows_its_inputs(step, lambda: x.data.mul_(1.5), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_evaluation_are_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    from benchmarks.bert.model import _wide_logits

    hidden, table = random(300, 1024, dtype=dtype), random(30528, 1024, dtype=dtype, seed=1)
    bias = random(30528, dtype=dtype)
    logits = _wide_logits(hidden, table, bias)
    expected = hidden.double() @ table.double().t() + bias.double()
    assert logits.dtype == torch.float32
    assert (logits.double() - expected).norm() < 1e-5 * expected.norm()
