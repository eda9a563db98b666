"""Test flat buffers: views, alignment and padding, and their buckets, pieces and fragments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.optim.buffers import ALIGNMENT_BYTES, FRAGMENT_ALIGNMENT, FlatBuffer, build_flat_buffers

# Views


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


def weights(*sizes: int, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Return parameters of these sizes whose values number all elements."""
    found, first = {}, 1
    for index, size in enumerate(sizes):
        found[f"w{index}"] = nn.Parameter(torch.arange(first, first + size).to(dtype))
        first += size
    return found


def of_ranks(ranks: int, *sizes: int, bucket_bytes: int, parts: dict[str, int] | None = None) -> list[FlatBuffer]:
    """Return the buffer of each rank."""
    return [FlatBuffer([weights(*sizes)], parts, ranks, index, bucket_bytes) for index in range(ranks)]


def test_a_bucket_is_closed_from_the_end_when_it_holds_enough():
    buffer = FlatBuffer([weights(64, 64, 64, 64, 64)], bucket_bytes=2 * 64 * 4)
    assert [[s.name for s in bucket.segments] for bucket in buffer.buckets] == [["w0"], ["w1", "w2"], ["w3", "w4"]]
    assert [bucket.readiness for bucket in buffer.buckets] == pytest.approx([1.0, 0.8, 0.4])


def test_buckets_of_groups_do_not_mix():
    buffer = FlatBuffer([weights(10), {"other": nn.Parameter(torch.ones(10))}])
    assert [bucket.group for bucket in buffer.buckets] == [0, 1]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_pieces_are_equal_and_start_on_the_alignment(ranks, dtype):
    for index in range(ranks):
        groups = [weights(1000, 70, dtype=dtype), {"b": nn.Parameter(torch.ones(3, dtype=dtype))}]
        for bucket in FlatBuffer(groups, None, ranks, index).buckets:
            assert (bucket.own.stop - bucket.own.start) * ranks == bucket.stop - bucket.start
            assert bucket.own.start * dtype.itemsize % 256 == 0
            assert bucket.in_shard.start * dtype.itemsize % 256 == 0


def test_one_rank_has_the_buffer_itself_without_padding_between_buckets():
    (buffer,) = of_ranks(1, 64, 128, 64, bucket_bytes=256)
    assert buffer.shard.parameters is buffer.parameters
    assert buffer.shard.gradients is buffer.gradients
    assert buffer.parameters.numel() == 256


def test_every_element_belongs_to_exactly_one_rank():
    held: list[Tensor] = []
    for buffer in of_ranks(4, 1000, 70, 3, 500, bucket_bytes=2000):
        for fragment in buffer.shard.fragments:
            held.append(buffer.shard.parameters[fragment.start : fragment.start + fragment.numel])
    assert torch.cat(held).sort().values.tolist() == list(range(1, 1574))


def test_a_piece_ends_inside_a_tensor_and_another_goes_on_there():
    # 1000 elements fill a bucket of 1024, which is two pieces of 512
    first, second = of_ranks(2, 1000, bucket_bytes=1)
    assert [(f.tensor, f.start, f.numel, f.stop) for f in first.shard.fragments] == [(0, 0, 512, 512)]
    assert [(f.tensor, f.start, f.numel, f.stop) for f in second.shard.fragments] == [(0, 0, 488, 512)]
    assert second.shard.parameters[0].item() == 513.0


def test_a_piece_that_holds_nothing_but_padding_has_no_fragment():
    _, second = of_ranks(2, 60, bucket_bytes=1)
    assert second.shard.fragments == ()
    assert second.shard.parameters.tolist() == [0.0] * 64


def test_pieces_of_all_buckets_follow_one_another_in_the_shard():
    _, second = of_ranks(2, 256, 256, bucket_bytes=1024)
    assert [(f.tensor, f.start) for f in second.shard.fragments] == [(0, 0), (1, 128)]
    assert second.shard.parameters.tolist() == [*range(129, 257), *range(385, 513)]


def test_parts_are_tensors_of_their_own():
    (whole,) = of_ranks(1, 192, 64, bucket_bytes=1, parts={"w0": 3})
    assert whole.tensors == 4
    assert [(f.tensor, f.start, f.numel) for f in whole.shard.fragments] == [
        (0, 0, 64), (1, 64, 64), (2, 128, 64), (3, 192, 64)
    ]  # fmt: skip


def test_parts_are_cut_by_pieces_too():
    # three parts of 128 in two pieces of 192: the second part is cut in the middle
    first, second = of_ranks(2, 384, bucket_bytes=1, parts={"w0": 3})
    assert [(f.tensor, f.numel) for f in first.shard.fragments] == [(0, 128), (1, 64)]
    assert [(f.tensor, f.start, f.numel) for f in second.shard.fragments] == [(1, 0, 64), (2, 64, 128)]


def test_tensors_are_numbered_through_all_dtypes():
    groups = [{"a": nn.Parameter(torch.ones(128, 1)), "b": nn.Parameter(torch.ones(4).half())}]
    found = build_flat_buffers(groups, {"a": 2})
    assert [[f.tensor for f in buffer.shard.fragments] for buffer in found] == [[0, 1], [2]]


def test_only_half_parameters_have_masters_of_their_own():
    single, half = (FlatBuffer([weights(5, dtype=d)]).shard for d in (torch.float32, torch.half))
    assert single.masters is single.parameters
    assert half.masters.dtype == torch.float32
    assert torch.equal(half.masters, half.parameters.float())


@pytest.mark.parametrize(
    ("parameter", "parts", "message"),
    [
        (torch.ones(128, 2), 3, "128 rows does not divide into 3"),
        (torch.ones(6, 10), 3, f"20 elements does not end on a multiple of {FRAGMENT_ALIGNMENT}"),
        (torch.ones(64, 6).t(), 3, "rows do not follow one another"),
        (torch.ones(()), 2, "1 rows does not divide"),
    ],
)
def test_parts_that_cannot_be_are_refused(parameter, parts, message):
    with pytest.raises(ValueError, match=message):
        build_flat_buffers([{"w": nn.Parameter(parameter)}], {"w": parts})


def test_parts_of_an_unknown_parameter_are_refused():
    with pytest.raises(ValueError, match="'q', which is none"):
        build_flat_buffers([weights(64)], {"q": 3})
