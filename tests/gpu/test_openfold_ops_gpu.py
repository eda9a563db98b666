"""Test OpenFold's attention on a GPU: the memory of the bias gradient, equal bits in every run, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.openfold.ops.pair_bias_attention.triton import pair_bias_attention
from tests.gpu.support import GPU, captured

pytestmark = pytest.mark.gpu

ROWS, POSITIONS, HEADS, HEAD_SIZE = 128, 256, 4, 32


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random arguments of the attention, which have gradients except for the mask."""
    generator = torch.Generator(GPU).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=GPU, generator=generator).bfloat16().requires_grad_()

    qkvg = normal(1, ROWS, POSITIONS, 4, HEADS, HEAD_SIZE)
    exists = torch.ones(1, ROWS, POSITIONS, device=GPU)
    exists[:, :, -9:] = 0.0
    return qkvg, normal(HEADS, HEAD_SIZE), exists, normal(1, HEADS, POSITIONS, POSITIONS)


def gradients(qkvg: Tensor, gate_bias: Tensor, exists: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Return the context without autograd's graph, which would tie the inputs to this stream, and the gradients."""
    context = pair_bias_attention(qkvg, gate_bias, exists, bias)
    return context.detach(), *torch.autograd.grad(context, (qkvg, gate_bias, bias), torch.ones_like(context))


def test_the_gradient_of_the_bias_needs_less_memory_than_the_gradients_of_its_rows() -> None:
    given = inputs()
    context = pair_bias_attention(*given)
    gradient = torch.ones_like(context)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(context, [each for each in given if each.requires_grad], gradient)
    of_rows = 4 * ROWS * HEADS * POSITIONS**2
    of_qkvg = 2 * given[0].numel()
    assert torch.cuda.max_memory_allocated() - before < of_qkvg + of_rows / 2


def test_a_graph_and_every_run_give_the_same_bits() -> None:
    given = inputs()
    expected = gradients(*given)
    graph, found = captured(lambda: gradients(*given))
    for _ in range(3):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
