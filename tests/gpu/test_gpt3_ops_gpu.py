"""Test the Triton operations between GPT-3's products in one CUDA graph, and copies by attention libraries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import bias_gelu, causal_attention, qkv_gradient, row_norm
from common.ops.fp8_cast.reference import Scaling
from common.ops.operation import OperationRequest
from common.ops.sizes import gpt3 as size
from tests.gpu.captures import follows_its_inputs

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

COPYING = ("te", "flash")
"""Libraries that copy their inputs, which have three times the size of the result."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in causal_attention.CAUSAL_ATTENTION.fast if name not in COPYING])
def test_attention_copies_no_interleaved_heads(name: str, dtype: torch.dtype) -> None:
    request = OperationRequest(torch.device("cuda"), dtype, {"head_size": size.HEAD_SIZE})
    reason = causal_attention.CAUSAL_ATTENTION.unsupported(name, request)
    if reason is not None:
        pytest.skip(reason)
    qkv = random(size.ROWS, 512, 8, 3, size.HEAD_SIZE, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = causal_attention.CAUSAL_ATTENTION.function(name).forward(*qkv.unbind(3), 0.1)
    assert torch.cuda.max_memory_allocated() - before < 3 * o.numel() * o.element_size()


def test_a_layers_operations_in_a_graph_follow_their_inputs_and_scales() -> None:
    """Norm, GELU and the gradient of query, key and value: what is captured gives in every replay what eager code does,
    bit for bit, so that the sums over tokens have an order of their own."""
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
