"""Flat buffers: views, alignment, padding, and the detection of detached views."""

import pytest
import torch
from torch import nn

from common.optim.buffers import ALIGNMENT_BYTES, FlatBuffer, build_flat_buffers


def convolution() -> nn.Conv2d:
    return nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)


def test_parameters_keep_values_and_strides():
    conv = convolution()
    values, strides = conv.weight.detach().clone(), conv.weight.stride()
    FlatBuffer([dict(conv.named_parameters())])
    assert torch.equal(conv.weight.detach(), values)
    assert conv.weight.stride() == strides
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert conv.weight.grad is not None
    assert conv.weight.grad.stride() == strides


def test_views_alias_the_buffers():
    conv = convolution()
    buffer = FlatBuffer([dict(conv.named_parameters())])
    buffer.parameters.fill_(2.0)
    buffer.gradients.fill_(3.0)
    assert conv.weight.detach().unique().tolist() == [2.0]
    assert conv.bias.grad.unique().tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_tensor_starts_on_256_bytes(dtype):
    parameters = {str(n): nn.Parameter(torch.ones(n, dtype=dtype)) for n in (1, 63, 64, 65, 129)}
    buffer = FlatBuffer([parameters])
    assert ALIGNMENT_BYTES == 256
    assert [s.start * dtype.itemsize % 256 for s in buffer.segments] == [0] * 5
    assert [s.numel for s in buffer.segments] == [1, 63, 64, 65, 129]


def test_backward_accumulates_into_the_flat_gradients_and_leaves_padding_zero():
    conv = convolution()
    reference = convolution()
    reference.load_state_dict(conv.state_dict())
    buffer = FlatBuffer([dict(conv.named_parameters())])
    images = torch.randn(2, 2, 3, 6, 6).unbind()
    for image in images:
        conv(image).square().sum().backward()
        reference(image).square().sum().backward()
    buffer.check()
    assert torch.equal(conv.weight.grad, reference.weight.grad)
    assert torch.equal(buffer.view(buffer.gradients, buffer.segments[1]), reference.bias.grad)
    used = sum(s.numel for s in buffer.segments)
    assert buffer.gradients.count_nonzero().item() <= used
    assert buffer.gradients[buffer.segments[0].numel : buffer.segments[0].stop].count_nonzero().item() == 0


def test_zeroing_keeps_the_views():
    conv = convolution()
    buffer = FlatBuffer([dict(conv.named_parameters())])
    conv(torch.randn(1, 3, 6, 6)).sum().backward()
    buffer.zero_gradients()
    buffer.check()
    assert conv.weight.grad.count_nonzero().item() == 0


def test_one_buffer_for_each_dtype():
    conv, norm = convolution().half(), nn.BatchNorm2d(5)
    buffers = build_flat_buffers([dict(conv.named_parameters()), dict(norm.named_parameters())])
    assert [b.dtype for b in buffers] == [torch.float16, torch.float32]
    assert [s.group for s in buffers[1].segments] == [1, 1]


def detach_by_cast(conv):
    conv.half()


def detach_by_data(conv):
    conv.weight.data = conv.weight.data.clone()


def detach_by_zero_grad(conv):
    conv.zero_grad(set_to_none=True)


def detach_by_grad(conv):
    conv.bias.grad = torch.zeros_like(conv.bias)


@pytest.mark.parametrize("detach", [detach_by_cast, detach_by_data, detach_by_zero_grad, detach_by_grad])
def test_detached_view_is_an_error(detach):
    conv = convolution()
    buffer = FlatBuffer([dict(conv.named_parameters())])
    detach(conv)
    with pytest.raises(RuntimeError, match="no longer lies in the optimizer's flat buffer"):
        buffer.check()


def test_loading_a_state_dict_keeps_the_views():
    conv = convolution()
    buffer = FlatBuffer([dict(conv.named_parameters())])
    conv.load_state_dict(convolution().state_dict())
    buffer.check()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "no parameter"),
        ({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}, "complex64"),
        ({"w": nn.Parameter(torch.zeros(0))}, "no elements"),
        ({"w": nn.Parameter(torch.zeros(4, 4)[:, :2])}, "not dense"),
        ({"w": nn.Parameter(torch.zeros(1).expand(3))}, "not dense"),
    ],
)
def test_unusable_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        build_flat_buffers([parameters])
