"""Test operations of transformers in CUDA graphs, which use new inputs and scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import attention, bias_gelu, causal_attention, dropout_add_norm, qkv_gradient, row_norm, swiglu
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling
from common.ops.operation import OperationRequest
from common.ops.sizes import gpt3 as size
from tests.gpu.support import GPU, WITH_FP8, captured, follows_its_inputs, relative_error

pytestmark = pytest.mark.gpu

# BERT


FP8 = pytest.mark.parametrize(
    "fp8",
    [
        False,
        pytest.param(True, marks=WITH_FP8),
    ],
    ids=["16 bits", "FP8"],
)


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


# Llama


HEAD_SIZE = 128
SCALE = 0.1
TOLERANCES = (1.2e-2, 1e-3, 2.4e-2, 2.4e-2, 2.4e-2)
"""Largest relative errors of the context, of log-sum-exp, and of the gradients, in bf16."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [8192, 16384, 5000])
def test_a_recomputed_norm_has_the_bits_of_the_first_time(features: int, dtype: torch.dtype) -> None:
    norm = row_norm.RMS_NORM.function("triton")
    residual, delta = random(1003, features, dtype=dtype) * 3, random(1003, features, dtype=dtype, seed=1)
    weight = random(features, dtype=dtype, seed=2)
    normed = norm.forward(residual, delta, weight, 1e-5)
    assert torch.equal(normed.residual, (residual.float() + delta.float()).to(dtype))
    assert torch.equal(norm.recompute(normed.residual, normed.moments, weight), normed.y)


@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (256, 768)])
@pytest.mark.parametrize("name", list(causal_attention.CAUSAL_ATTENTION.fast))
def test_attention_of_a_library_in_a_graph_follows_its_inputs(name: str, queries: int, keys: int) -> None:
    request = OperationRequest(GPU, torch.bfloat16, {"head_size": HEAD_SIZE})
    if reason := causal_attention.CAUSAL_ATTENTION.unsupported(name, request):
        pytest.skip(reason)
    attention, reference = causal_attention.CAUSAL_ATTENTION.function(name), causal_attention.CAUSAL_ATTENTION.reference
    q, do = (random(2, queries, 16, HEAD_SIZE) for _ in range(2))
    k, v = (random(2, keys + 64, 2, HEAD_SIZE)[:, :keys] for _ in range(2))
    given = (q, k, v, do)

    def both() -> tuple[Tensor, ...]:
        o, saved = attention.forward(q, k, v, SCALE)
        return o, saved.lse, *attention.backward(do, saved)

    graph, found = captured(both)
    for replay in range(2):
        for which, x in enumerate(given):
            x.copy_(random(*x.shape, seed=10 + 4 * replay + which))
        graph.replay()
        o, saved = reference.forward(q.double(), k.double(), v.double(), SCALE)
        expected = (o, saved.lse, *reference.backward(do.double(), saved))
        for value, wanted, tolerance in zip(found, expected, TOLERANCES, strict=True):
            assert value.shape == wanted.shape
            assert relative_error(value, wanted) < tolerance


@WITH_FP8
def test_operations_of_llama_in_a_graph_follow_their_inputs_and_scales() -> None:
    """Every replay of norm, attention and SwiGLU, forward and backward, gives the results of eager code."""
    norm, act = row_norm.RMS_NORM.function("triton"), swiglu.SWIGLU.function("triton")
    attention = causal_attention.CAUSAL_ATTENTION.function("cudnn")
    x, weight = random(512, 1024), random(1024, seed=1)
    qkv = random(1, 512, 8, 128, seed=2)

    def step(states: list[Scaling]) -> list[Tensor]:
        normed = norm.forward(x, x, weight, 1e-5, fp8=states[0])
        activated = act.forward(normed.y, fp8=states[1], save_fp8=states[2])
        d_gate_up, _ = act.backward(x[:, :512].contiguous(), activated.saved)
        dx, dx8 = norm.backward(d_gate_up, normed.residual, normed.moments, weight, fp8=states[3])
        context, _ = attention.forward(qkv, qkv[:, :, :2], qkv[:, :, 2:4], 0.1)
        return [normed.y8.data.view(torch.uint8), activated.y8.data.view(torch.uint8), dx, dx8.scale_inverse, context]

    follows_its_inputs(step, lambda: x.mul_(1.5), 4)


# GPT-3


COPYING = ("te", "flash")
"""Libraries that copy their inputs, which are three times as large as the result."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in causal_attention.CAUSAL_ATTENTION.fast if name not in COPYING])
def test_attention_copies_no_interleaved_heads(name: str, dtype: torch.dtype) -> None:
    request = OperationRequest(GPU, dtype, {"head_size": size.HEAD_SIZE})
    reason = causal_attention.CAUSAL_ATTENTION.unsupported(name, request)
    if reason is not None:
        pytest.skip(reason)
    qkv = random(size.ROWS, 512, 8, 3, size.HEAD_SIZE, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = causal_attention.CAUSAL_ATTENTION.function(name).forward(*qkv.unbind(3), 0.1)
    assert torch.cuda.max_memory_allocated() - before < 3 * o.numel() * o.element_size()


@WITH_FP8
def test_operations_of_gpt3_in_a_graph_follow_their_inputs_and_scales() -> None:
    """Every replay of norm, GELU and the gradient of query, key and value gives the bits of eager code.

    So sums over tokens have a fixed order.
    """
    norm = row_norm.LAYER_NORM_1P.function("triton")
    gelu = bias_gelu.BIAS_GELU_PASSES.function("triton")
    join = qkv_gradient.QKV_GRADIENT.function("triton")
    x, bias = random(512, 3072), random(3072, seed=1)

    def step(states: list[Scaling]) -> list[Tensor]:
        normed = norm.forward(x, x, bias, 1e-5, bias, bias, fp8=states[0])
        activated = gelu.forward(normed.y, bias, fp8=states[1], save_fp8=states[2])
        back = gelu.backward(x, activated.saved, bias, fp8=states[3])
        dx, dx8 = norm.backward(x, normed.residual, normed.moments, bias, x, fp8=states[4])
        sums = norm.parameter_gradients(x, normed.residual, normed.moments, dx)
        joined = join(*dx.view(512, 8, 3, 128).unbind(2), half=False, fp8=states[5], transpose=True)
        in_fp8 = (normed.y8, activated.y8, activated.saved, back.dx8, dx8, joined.d_qkv8)
        return [
            *(x8.data.view(torch.uint8) for x8 in in_fp8), *(x8.scale_inverse for x8 in in_fp8),
            joined.d_qkv8.transposed.view(torch.uint8), dx, *sums, back.bias, joined.bias,
        ]  # fmt: skip

    follows_its_inputs(step, lambda: x.mul_(1.5), 6)
