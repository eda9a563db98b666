"""Test 3D U-Net's operations on a GPU in ways that cases cannot express.

The tests cover capture, repeatability, values with a large mean, and offsets beyond int32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm, output_convolution, upsample
from benchmarks.unet3d.ops.instance_norm import instance_norm_relu_reference
from benchmarks.unet3d.ops.upsample import upsample_reference
from common.ops import local_convolution
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

EPSILON = 1e-5
CHANNELS_LAST = torch.channels_last_3d


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = instance_norm.INSTANCE_NORM.function("triton")(x, weight, bias, EPSILON)[0]
    return result


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def test_more_joined_elements_than_int32_counts() -> None:
    x = torch.empty((17, 64, 64, 64, 64), device="cuda", dtype=torch.bfloat16, memory_format=CHANNELS_LAST).normal_()
    weight, bias = (random(*shape, dtype=torch.bfloat16) for shape in ((64, 32, 2, 2, 2), (32,)))
    shape = (17, 32, 128, 128, 128)
    skip = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=CHANNELS_LAST).normal_()
    d_joined = torch.cat((skip, skip), 1)
    joined, dx, *_ = with_gradients(upsample.UPSAMPLE.function("triton"), [x, weight, bias, skip], d_joined)
    assert joined.numel() > 1 << 31
    for sample in (slice(0, 1), slice(16, 17)):
        inputs = [value.double() for value in (x[sample], weight, bias, skip[sample])]
        y, expected, *_ = with_gradients(upsample_reference, inputs, d_joined[sample].double())
        for found, exact in ((joined[sample], y), (dx[sample], expected)):
            assert (found.double() - exact).norm() < 1.2e-2 * exact.norm()


def test_norm_of_two_million_voxels_with_a_large_mean_keeps_the_variance() -> None:
    x = (1000 + random(1, 32, 128, 128, 128)).contiguous(memory_format=CHANNELS_LAST)
    one, bias = torch.ones(32, device="cuda"), torch.full((32,), 8.0, device="cuda")
    expected = instance_norm_relu_reference(x.double(), one.double(), bias.double(), EPSILON)[0]
    assert (norm(x, one, bias).double() - expected).norm() < 1e-4 * expected.norm()


def test_norm_of_more_elements_than_int32_counts() -> None:
    samples = 33
    x = torch.empty((samples, 32, 128, 128, 128), device="cuda", dtype=torch.bfloat16, memory_format=CHANNELS_LAST)
    assert x.numel() > 1 << 31
    x.normal_()
    dy = torch.empty_like(x).normal_()
    weight, bias = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
    found = with_gradients(norm, [x, weight, bias], dy)
    last = with_gradients(norm, [x[-1:], weight, bias], dy[-1:])
    for value, reference in zip(found[:2], last[:2], strict=True):
        difference = (value[-1:].float() - reference.float()).norm()
        assert difference < 1e-3 * reference.float().norm()


def test_operations_are_captured_and_give_the_same_bits_in_every_run() -> None:
    y_shape = (2, 32, 48, 48, 48)
    x, dy = (
        random(*y_shape, dtype=torch.bfloat16, seed=seed).contiguous(memory_format=CHANNELS_LAST) for seed in (0, 1)
    )
    leaves = [value.requires_grad_() for value in (x, 1 + random(32, seed=2) / 2, random(32, seed=3) / 2)]
    label = torch.zeros((2, 48, 48, 48), device="cuda", dtype=torch.uint8)
    convolution = local_convolution.LOCAL_CONVOLUTION.function("triton")
    kernel = random(32, 1, 3, 3, 3, dtype=torch.bfloat16, seed=4)
    shapes = ((2, 64, 24, 24, 24), (64, 32, 2, 2, 2), (32,), (3, 64, 1, 1, 1), (3,))
    coarse, up_weight, up_bias, weight, bias = (random(*shape, dtype=torch.bfloat16) for shape in shapes)
    up, one = [value.requires_grad_() for value in (up_bias, weight, bias)], torch.ones((), device="cuda")

    def step() -> list[Tensor]:
        y, skip = instance_norm.INSTANCE_NORM.function("triton")(*leaves, EPSILON)
        # no gradients of coarse and its weight: cuDNN computes them, with sums that can differ between runs
        joined = upsample.UPSAMPLE.function("triton")(coarse, up_weight, up_bias, skip)
        logits = output_convolution.OUTPUT_CONVOLUTION.function("triton")(joined, weight, bias)
        value = dice_cross_entropy.DICE_CROSS_ENTROPY.function("triton")(logits, label, 1e-6)
        image = leaves[0].detach()[:, :1].contiguous()
        gradients = torch.autograd.grad((y, value), [*leaves, *up], (dy, one))
        _, dweight = convolution.backward(dy, image, kernel, 1, (False, True))
        first = convolution.forward(image, kernel, 1)
        return [*(result.detach() for result in (y, joined, logits, value)), first, dweight, *gradients]

    graph, results = captured(step)
    for seed in range(2):
        with torch.no_grad():
            leaves[0].copy_(random(*leaves[0].shape, seed=10 + seed))
            label.copy_(random(*label.shape, seed=seed) > 0)
        for tensor in results:
            tensor.fill_(float("nan"))
        graph.replay()
        for tensor, reference in zip(results, step(), strict=True):
            assert torch.equal(tensor, reference)
