"""Test convolutions with moments: every batch norm gets the moments of its own input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.resnet.model import Architecture, ResNet50
from common.errors import UnsupportedImplementation
from common.nn.batch_norm import BatchNorm2d
from common.nn.convolution import Conv2d
from common.ops.convolution import convolution_reference
from common.ops.operation import Choice


def convolution_with_moments(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, weight, stride=stride, padding=padding)
    return y, torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))])[:, None].detach()


def small_network() -> ResNet50:
    return ResNet50(Architecture(8, 4, 1e-5, 0.1, layers=(1, 2)), torch.Generator().manual_seed(0))


def test_the_reference_leaves_no_moments():
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(16, 8, 3, 3)
    y, moments = convolution_reference(x, weight, 2, 1)
    assert torch.equal(y, F.conv2d(x, weight, stride=2, padding=1))
    assert moments is None


def test_a_network_without_a_gpu_refuses_cudnn():
    with pytest.raises(UnsupportedImplementation, match="CUDA device"):
        small_network().choose_implementations({"convolution_moments": "cudnn"})


def test_every_batch_norm_gets_the_moments_of_its_own_input():
    network = small_network()
    given = {}
    for module in network.modules():
        if isinstance(module, Conv2d):
            module._convolution = Choice("exact", convolution_with_moments)
    for name, module in network.named_modules():
        if isinstance(module, BatchNorm2d):
            _check_moments(name, module, given)
    network.train()(torch.randn(2, 4, 32, 32))
    convolutions = [module for module in network.modules() if isinstance(module, Conv2d)]
    assert sum(given.values()) == len(convolutions)


def _check_moments(name: str, layer: BatchNorm2d, given: dict[str, int]) -> None:
    """Make ``layer`` fail if the moments that it gets are not those of its input."""
    batch_norm, add_relu = layer._batch_norm.function, layer._add_relu.function

    def check(x: Tensor, moments: Tensor | None) -> None:
        assert moments is not None, name
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])[:, None]
        assert torch.allclose(moments, sums, rtol=1e-4, atol=1e-4), name
        given[name] = given.get(name, 0) + 1

    def checked(x: Tensor, *args: object, moments: Tensor | None, **options: object) -> Tensor:
        check(x, moments)
        return batch_norm(x, *args, moments=moments, **options)

    def checked_add_relu(
        x: Tensor, norm: object, residual: Tensor, residual_norm: object, *, residual_moments: Tensor | None, **options
    ) -> tuple[Tensor, Tensor]:
        check(x, options["moments"])
        if residual_norm is not None:
            check(residual, residual_moments)
        return add_relu(x, norm, residual, residual_norm, residual_moments=residual_moments, **options)

    layer._batch_norm = Choice("checked", checked)
    layer._add_relu = Choice("checked", checked_add_relu)


def test_evaluation_leaves_no_moments():
    layer = Conv2d(8, 8, 3)
    layer._convolution = Choice("exact", convolution_with_moments)
    assert layer.eval().with_moments(torch.randn(1, 8, 5, 5))[1] is None
