"""Test operations of a decoder in CUDA graphs, which use new inputs and scales, and a norm that is recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import causal_attention, row_norm, swiglu
from common.ops.fp8_cast.reference import Scaling
from common.ops.operation import OperationRequest
from tests.gpu.captures import captured, follows_its_inputs

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

HEAD_SIZE = 128
SCALE = 0.1
TOLERANCES = (1.2e-2, 1e-3, 2.4e-2, 2.4e-2, 2.4e-2)
"""Largest relative errors of the context, of log-sum-exp, and of the gradients, in bf16."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


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
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, {"head_size": HEAD_SIZE})
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
            error = (value.double() - wanted).norm() / wanted.norm()
            assert error < tolerance, f"relative error {error:.2e}"


def test_a_layers_operations_in_a_graph_follow_their_inputs_and_scales() -> None:
    """Norm, attention and SwiGLU, forward and backward: what is captured gives in every replay what eager code does."""
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
