"""Test Stable Diffusion's operations on a GPU in ways that cases cannot express.

They are captured and repeatable, do not wait for the device, and offsets in large tensors do not overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import abar, noised, velocity_loss
from common.ops import add_layer_norm, bias_gradient, dense_attention, geglu, group_norm, upsample_convolution
from common.ops.cases import Draw
from common.ops.catalogue import cases_of
from common.ops.operation import AUTO, Operation, OperationRequest
from common.ops.sizes import diffusion as size
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
OFFSETS = 1 << 31
"""Smallest number of elements whose offsets overflow int32."""


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


# Captured and repeatable


def tensors_in(results: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(results, Tensor):
        yield results.detach()
    elif isinstance(results, tuple | list):
        for each in results:
            yield from tensors_in(each)


def check_captured(run: Callable[[], Any], noise: float) -> None:
    """Check that replays of a graph give the values of an eager run up to ``noise``."""
    expected = [value.clone() for value in tensors_in(run())]
    graph, results = captured(lambda: list(tensors_in(run())))
    for _ in range(3):
        for value in results:
            value.fill_(-1)
        graph.replay()
    for found, value in zip(results, expected, strict=True):
        if noise:
            assert (found.double() - value.double()).norm() <= noise * value.double().norm()
        else:
            assert torch.equal(found, value)


ATTENTION, UPSAMPLING = dense_attention.DENSE_ATTENTION, upsample_convolution.UPSAMPLE_CONVOLUTION
ONE = {"samples": 4, "channels": 320, "keep": False}
PAIR = {"samples": 4, "channels": 960, "inputs": 2, "first": 640, "keep": False}


@pytest.mark.parametrize(
    ("operation", "name", "sizes", "noise"),
    [
        (group_norm.GROUP_NORM, "triton", {**ONE, "added": True}, 0.0),
        (group_norm.GROUP_NORM, "triton", {**ONE, "side": 8, "groups": 32, "silu": False}, 0.0),
        (group_norm.GROUP_NORM, "triton", PAIR, 0.0),
        (group_norm.GROUP_NORM, "triton", {**PAIR, "side": 16}, 0.0),
        (geglu.GEGLU, "triton", {"rows": 8192}, 0.0),
        (add_layer_norm.ADD_LAYER_NORM, "triton", {"rows": 8192}, 0.0),
        # some libraries sum with atomics
        *((UPSAMPLING, name, {"pictures": 2, "channels": 320, "filters": 320}, 1e-2) for name in UPSAMPLING.names),
        *(
            (ATTENTION, name, {"pictures": 2, "queries": 1024, "keys": 1024 if packed else 77, "packed": packed}, 1e-3)
            for name in ATTENTION.fast
            for packed in (True, False)
        ),
    ],
)
def test_passes_are_repeatable_and_captured(
    operation: Operation, name: str, sizes: dict[str, Any], noise: float
) -> None:
    case = cases_of(operation)[0]
    dtype = case.dtypes[-1]
    if reason := operation.unsupported(name, case.request(CUDA, dtype, **sizes)):
        pytest.skip(reason)
    passes = case.passes(operation.function(name), Draw(CUDA, dtype), **sizes)
    check_captured(lambda: [each.run() for each in passes], noise)


def test_gradients_of_biases_are_repeatable_and_captured() -> None:
    d_RC = random(32 * 64**2, 320)
    check_captured(lambda: bias_gradient.BIAS_GRADIENT.function("triton")(d_RC, torch.float16), 0.0)


def test_noise_and_loss_are_captured_and_follow_seed_and_ids() -> None:
    held, seed, ids = (
        random(2, 8, 64, 64, dtype=torch.float32),
        torch.tensor(3, device=CUDA),
        torch.arange(2, device=CUDA),
    )
    abar_T = abar(1000, 0.00085, 0.012).to(CUDA)

    def run() -> list[Tensor]:
        x_t, v, t_N = noised(held, seed, ids, abar_T, 0.18215, torch.float16)
        prediction = x_t.detach().requires_grad_()
        loss = velocity_loss(prediction, v)
        return [x_t, v, t_N, loss.detach(), *torch.autograd.grad(loss * 1024.0, prediction)]

    graph, found = captured(run)
    before = found[0].new_empty(0)
    for step in range(2):
        seed.fill_(step)
        ids.add_(step)
        graph.replay()
        for value, eager in zip(found, run(), strict=True):
            assert torch.equal(value, eager)
        assert not torch.equal(found[0], before)
        before = found[0].clone()


# Large tensors


@pytest.mark.parametrize(("channels", "side"), [(320, 64), (640, 32)])
def test_group_norm_counts_its_elements_in_64_bits(channels: int, side: int) -> None:
    samples = OFFSETS // (channels * side**2) + 1
    x = torch.empty((samples, side, side, channels), dtype=torch.float16, device="cuda").normal_().permute(0, 3, 1, 2)
    weight, bias = random(channels, seed=1), random(channels, seed=2)
    function = group_norm.GROUP_NORM.function("triton")
    # the number of programs differs, so sums differ in the last bits
    check_last_rows(lambda leaf: [function((leaf,), weight, bias, 16, 1e-5, silu=True)], x, 2, 2e-3)


@pytest.mark.parametrize("operation", [geglu.GEGLU, add_layer_norm.ADD_LAYER_NORM], ids=lambda found: found.name)
def test_elements_of_rows_are_counted_in_64_bits(operation: Operation) -> None:
    x = torch.empty((OFFSETS // 320 + 64, 320), dtype=torch.float16, device="cuda").normal_()
    weight, function = random(320), operation.function("triton")

    def results(leaf: Tensor) -> Any:
        return [function(leaf, weight)] if operation is geglu.GEGLU else function(leaf, leaf, weight, weight, 1e-5)

    check_last_rows(results, x, 64, 0.0)


def check_last_rows(function: Callable[[Tensor], Any], x: Tensor, rows: int, noise: float) -> None:
    """Check that results and gradient of the last rows equal those of a tensor with only these rows."""
    last = []
    for given in (x, x[-rows:]):
        leaf = given.detach().requires_grad_()
        results = function(leaf)
        # gradients of the results: the first columns of the input
        (dx,) = torch.autograd.grad(results, leaf, [given[:, : y.shape[1]] for y in results])
        last.append([value[-rows:].detach().clone() for value in (*results, dx)])
        del leaf, results, dx
    for large, small in zip(*last, strict=True):
        torch.testing.assert_close(large, small, rtol=noise, atol=noise)


# Choices


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [
        (bias_gradient.BIAS_GRADIENT, {}),
        (group_norm.GROUP_NORM, {"channels": 320, "groups": 16}),
        (group_norm.GROUP_NORM, {"channels": 960, "groups": 16, "inputs": 2}),
        (geglu.GEGLU, {}),
        (add_layer_norm.ADD_LAYER_NORM, {"features": 1280}),
    ],
)
def test_a_gpu_takes_the_kernels(operation: Operation, sizes: dict[str, int]) -> None:
    request = OperationRequest(torch.device("cuda"), torch.float16, sizes)
    assert operation.select(AUTO, request).name == "triton"


def test_a_library_is_chosen() -> None:
    sizes = {"head_size": size.HEAD_SIZE, "queries": 4096, "keys": size.CAPTION}
    for dtype in size.HALF:
        request = OperationRequest(CUDA, dtype, sizes)
        best_first = ("flash_attention_4", "cudnn_frontend", "cudnn")
        usable = [name for name in best_first if dense_attention.DENSE_ATTENTION.unsupported(name, request) is None]
        assert dense_attention.DENSE_ATTENTION.select(AUTO, request).name == usable[0]
