"""3D U-Net's Triton operations on a GPU: against float64 at layer sizes, captured, repeatable, and without overflow of
offsets in large tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm, output_convolution, upsample
from benchmarks.unet3d.ops.dice_cross_entropy.reference import dice_cross_entropy_reference
from benchmarks.unet3d.ops.instance_norm.reference import instance_norm_relu_reference
from common.ops import local_convolution
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
EPSILON = 1e-5
SMOOTH = 1e-6
CHANNELS_LAST = torch.channels_last_3d


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(8)]
    del held


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = instance_norm.INSTANCE_NORM.function("triton")(x, weight, bias, EPSILON)[0]
    return result


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return instance_norm_relu_reference(x, weight, bias, EPSILON)[0]


def loss(logits: Tensor, label: Tensor) -> Tensor:
    result: Tensor = dice_cross_entropy.DICE_CROSS_ENTROPY.function("triton")(logits, label, SMOOTH)
    return result


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in inputs]
    poison()
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], names: str, tolerance: float) -> None:
    for name, value, reference in zip(names.split(), found, expected, strict=True):
        error = (value.double() - reference).norm() / reference.norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, parameters: torch.dtype) -> tuple[list[Tensor], Tensor]:
    x = random(*shape, dtype=dtype).contiguous(memory_format=CHANNELS_LAST)
    dy = random(*shape, dtype=dtype, seed=1).contiguous(memory_format=CHANNELS_LAST)
    weight, bias = (1 + random(shape[1], seed=2) / 2).to(parameters), (random(shape[1], seed=3) / 2).to(parameters)
    # next to the ReLU's corner rounding decides whether a gradient passes: none comes in there
    z = F.instance_norm(x.double(), weight=weight.double(), bias=bias.double(), eps=EPSILON)
    return [x, weight, bias], dy.masked_fill_(z.abs() < 1e-3, 0.0)


@pytest.mark.parametrize("parameters", ["fp32", "input"])
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(
    ("channels", "size"), [(32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (320, 4), (48, 27), (8, 33)]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norm_equals_float64(dtype: torch.dtype, channels: int, size: int, batch: int, parameters: str) -> None:
    batch = min(batch, 2) if size == 128 else batch
    inputs, dy = norm_inputs(
        (batch, channels, size, size, size), dtype, dtype if parameters == "input" else torch.float32
    )
    found = with_gradients(norm, inputs, dy)
    expected = with_gradients(plain_norm, [value.double() for value in inputs], dy.double())
    assert_close(found, expected, "y x weight bias", TOLERANCE[dtype])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("channels", "size"), [(32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (48, 27)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_gradients_of_two_readers_of_the_norm_equal_float64(
    dtype: torch.dtype, channels: int, size: int, batch: int
) -> None:
    """The second reader is a skip connection: its gradient is a part of that of the joined channels."""
    inputs, dy = norm_inputs((batch, channels, size, size, size), dtype, torch.float32)
    d_joined = random(batch, 2 * channels, size, size, size, dtype=dtype, seed=4).contiguous(
        memory_format=CHANNELS_LAST
    )
    d_skip = d_joined[:, channels:].mul_(dy != 0)
    leaves = [value.detach().requires_grad_() for value in inputs]
    poison()
    results = instance_norm.INSTANCE_NORM.function("triton")(*leaves, EPSILON)
    assert results[0].data_ptr() == results[1].data_ptr()
    found = torch.autograd.grad(results, leaves, (dy, d_skip))
    _, *expected = with_gradients(plain_norm, [value.double() for value in inputs], dy.double() + d_skip.double())
    assert_close(found, expected, "x weight bias", TOLERANCE[dtype])


def exact_upsample(x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor, dy: Tensor) -> list[Tensor]:
    """Result and gradients in float64, corner by corner: cuDNN has no float64 convolution worth waiting for."""
    x, weight, bias, dy = (value.double() for value in (x, weight, bias, dy))
    filters = weight.shape[1]
    y, d_up = torch.empty_like(dy), dy[:, :filters]
    y[:, filters:] = skip
    dx, dweight = torch.zeros_like(x), torch.empty_like(weight)
    for corner in itertools.product(range(2), repeat=3):
        there = (slice(None), slice(None), *(slice(first, None, 2) for first in corner))
        product = torch.einsum("nidhw,io->nodhw", x, weight[:, :, *corner])
        y[:, :filters][there] = product + bias.view(1, -1, 1, 1, 1)
        dx += torch.einsum("nodhw,io->nidhw", d_up[there], weight[:, :, *corner])
        dweight[:, :, *corner] = torch.einsum("nidhw,nodhw->io", x, d_up[there])
    return [y, dx, dweight, d_up.sum((0, 2, 3, 4)), dy[:, filters:]]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("channels", "filters", "size"),
    [(64, 32, 64), (128, 64, 32), (256, 128, 16), (320, 256, 8), (320, 320, 4), (40, 24, 13), (9, 5, 17)],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_way_up_equals_float64(dtype: torch.dtype, channels: int, filters: int, size: int, batch: int) -> None:
    x = random(batch, channels, size, size - 1, size, dtype=dtype).contiguous(memory_format=CHANNELS_LAST)
    weight = (random(channels, filters, 2, 2, 2, seed=1) / channels**0.5).to(dtype)
    bias, fine = random(filters, dtype=dtype, seed=2), (2 * size, 2 * size - 2, 2 * size)
    skip = random(batch, filters, *fine, dtype=dtype, seed=3).contiguous(memory_format=CHANNELS_LAST)
    d_joined = random(batch, 2 * filters, *fine, dtype=dtype, seed=4).contiguous(memory_format=CHANNELS_LAST)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = with_gradients(upsample.UPSAMPLE.function("triton"), [x, weight, bias, skip], d_joined)
    assert found[0].is_contiguous(memory_format=CHANNELS_LAST)
    assert found[4].data_ptr() == d_joined[:, filters:].data_ptr()
    assert torch.equal(found[0][:, filters:], skip)
    expected = exact_upsample(x, weight, bias, skip, d_joined)
    ours, cudnns = (0, 3, 4), (1, 2)
    assert_close([found[i] for i in ours], [expected[i] for i in ours], "y bias skip", TOLERANCE[dtype])
    # whose fp32 sums run over half a million voxels
    tolerance = max(TOLERANCE[dtype], 1e-4)
    assert_close([found[i] for i in cudnns], [expected[i] for i in cudnns], "x weight", tolerance)


def test_more_joined_elements_than_int32_counts() -> None:
    x = torch.empty((17, 64, 64, 64, 64), device="cuda", dtype=torch.bfloat16, memory_format=CHANNELS_LAST).normal_()
    weight, bias = (random(*shape, dtype=torch.bfloat16) for shape in ((64, 32, 2, 2, 2), (32,)))
    shape = (17, 32, 128, 128, 128)
    skip = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=CHANNELS_LAST).normal_()
    d_joined = torch.cat((skip, skip), 1)
    joined, dx, *_ = with_gradients(upsample.UPSAMPLE.function("triton"), [x, weight, bias, skip], d_joined)
    assert joined.numel() > 1 << 31
    for sample in (slice(0, 1), slice(16, 17)):
        y, expected, *_ = exact_upsample(x[sample], weight, bias, skip[sample], d_joined[sample])
        assert_close([joined[sample], dx[sample]], [y, expected], "y x", TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(
    ("channels", "classes", "size"), [(32, 3, 128), (32, 3, 64), (64, 16, 48), (5, 1, 33), (37, 7, 21)]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_last_convolution_equals_float64(
    dtype: torch.dtype, channels: int, classes: int, size: int, batch: int, memory_format: torch.memory_format
) -> None:
    x = random(batch, channels, size, size - 1, size, dtype=dtype).contiguous(memory_format=CHANNELS_LAST)
    weight = (random(classes, channels, 1, 1, 1, seed=1) / channels**0.5).to(dtype)
    bias = random(classes, dtype=dtype, seed=2)
    dlogits = random(batch, classes, *x.shape[2:], dtype=dtype, seed=3).contiguous(memory_format=memory_format)
    found = with_gradients(output_convolution.OUTPUT_CONVOLUTION.function("triton"), [x, weight, bias], dlogits)
    assert found[0].is_contiguous()
    wide, dy = x.double(), dlogits.double()
    filters = weight.double().view(classes, channels)
    expected = [
        torch.einsum("ncdhw,kc->nkdhw", wide, filters) + bias.double().view(1, -1, 1, 1, 1),
        torch.einsum("nkdhw,kc->ncdhw", dy, filters),
        torch.einsum("nkdhw,ncdhw->kc", dy, wide).view(weight.shape),
        dy.sum((0, 2, 3, 4)),
    ]
    assert_close(found, expected, "y x weight bias", TOLERANCE[dtype])


@pytest.mark.parametrize("channels", [32, 64])
def test_the_folded_gradient_of_the_weight_follows_float32_at_its_real_size(channels: int) -> None:
    chosen = local_convolution.LOCAL_CONVOLUTION.select(
        AUTO,
        OperationRequest(torch.device("cuda"), torch.bfloat16, {"channels": channels}),
    )
    assert chosen.name == "folded"
    x, dy = (
        random(1, count, 128, 128, 128, dtype=torch.bfloat16, seed=seed).contiguous(memory_format=CHANNELS_LAST)
        for seed, count in enumerate((channels, 32))
    )
    weight = random(32, channels, 3, 3, 3, dtype=torch.bfloat16, seed=2).contiguous(memory_format=CHANNELS_LAST)
    dx, dweight = chosen.function().backward(dy, x, weight, 1, (False, True))
    assert dx is None
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        plain = local_convolution.LOCAL_CONVOLUTION.function("reference")()
        _, expected = plain.backward(dy.float(), x.float(), weight.float(), 1, (False, True))
    assert dweight.dtype == torch.bfloat16
    assert_close([dweight], [expected.double()], "weight", TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("filters", "size", "stride"), [(32, 128, 1), (24, 33, 1), (80, 30, 2)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_convolution_of_one_channel_equals_float64(
    dtype: torch.dtype, filters: int, size: int, stride: int, batch: int
) -> None:
    convolution = local_convolution.LOCAL_CONVOLUTION.function("triton")()
    x = random(batch, 1, size, size - 1, size, dtype=dtype)
    weight = (random(filters, 1, 3, 3, 3, seed=1) / 5).to(dtype).contiguous(memory_format=CHANNELS_LAST)
    poison()
    y = convolution.forward(x, weight, stride)
    assert y.is_contiguous(memory_format=CHANNELS_LAST)
    dy = random(*y.shape, dtype=dtype, seed=2).contiguous(memory_format=CHANNELS_LAST)
    poison()
    dx, dweight = convolution.backward(dy, x, weight, stride, (False, True))
    assert dx is None
    expected = torch.zeros_like(weight, dtype=torch.float64)
    for sample in range(batch):  # taps one by one: cuDNN has no float64 convolution worth waiting for
        padded = F.pad(x[sample, 0].double(), (1,) * 6)
        exact = torch.zeros_like(y[sample], dtype=torch.float64)
        for tap in range(27):
            place = (tap // 9, tap // 3 % 3, tap % 3)
            ends = [first + stride * (length - 1) + 1 for first, length in zip(place, y.shape[2:], strict=True)]
            seen = padded[tuple(slice(*range_, stride) for range_ in zip(place, ends, strict=True))]
            exact += weight[:, 0, *place].double()[:, None, None, None] * seen
            expected[:, 0, *place] += (dy[sample].double() * seen).sum((1, 2, 3))
        assert (y[sample].double() - exact).norm() < TOLERANCE[dtype] * exact.norm()
    assert dweight.dtype == dtype
    assert (dweight.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


def test_norm_of_two_million_voxels_with_a_large_mean_keeps_the_variance() -> None:
    x = (1000 + random(1, 32, 128, 128, 128)).contiguous(memory_format=CHANNELS_LAST)
    one, bias = torch.ones(32, device="cuda"), torch.full((32,), 8.0, device="cuda")
    expected = plain_norm(x.double(), one.double(), bias.double())
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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize("shape", [(7, 128, 128, 128), (1, 128, 128, 128), (3, 33, 35, 37)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_loss_equals_float64(dtype: torch.dtype, shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    logits = (2 * random(shape[0], 3, *shape[1:])).to(dtype).contiguous(memory_format=memory_format)
    generator = torch.Generator("cuda").manual_seed(1)
    label = torch.randint(3, shape, generator=generator, device="cuda", dtype=torch.uint8)
    label[0] = 0
    scale = torch.tensor(2.0**20, device="cuda")
    value, gradient = with_gradients(lambda leaf: loss(leaf, label), [logits], scale)
    expected, reference = with_gradients(
        lambda leaf: dice_cross_entropy_reference(leaf, label, SMOOTH), [logits.double()], scale.double()
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert gradient.is_contiguous(memory_format=memory_format)
    assert (gradient.double() - reference).norm() < TOLERANCE[dtype] * reference.norm()


def test_operations_are_captured_and_give_the_same_bits_in_every_run() -> None:
    inputs, dy = norm_inputs((2, 32, 48, 48, 48), torch.bfloat16, torch.float32)
    label = torch.zeros((2, 48, 48, 48), device="cuda", dtype=torch.uint8)
    leaves = [value.requires_grad_() for value in inputs]
    convolution = local_convolution.LOCAL_CONVOLUTION.function("triton")()
    kernel = random(32, 1, 3, 3, 3, dtype=torch.bfloat16, seed=4)
    shapes = ((2, 64, 24, 24, 24), (64, 32, 2, 2, 2), (32,), (3, 64, 1, 1, 1), (3,))
    x, up_weight, up_bias, weight, bias = (random(*shape, dtype=torch.bfloat16) for shape in shapes)
    up, one = [value.requires_grad_() for value in (up_bias, weight, bias)], torch.ones((), device="cuda")

    def step() -> list[Tensor]:
        y, skip = instance_norm.INSTANCE_NORM.function("triton")(*leaves, EPSILON)
        # x and its weight get no gradients: they would be cuDNN's, whose sums may differ from run to run
        joined = upsample.UPSAMPLE.function("triton")(x, up_weight, up_bias, skip)
        logits = output_convolution.OUTPUT_CONVOLUTION.function("triton")(joined, weight, bias)
        value, image = loss(logits, label), leaves[0].detach()[:, :1].contiguous()
        gradients = torch.autograd.grad((y, value), [*leaves, *up], (dy, one))
        _, dweight = convolution.backward(dy, image, kernel, 1, (False, True))
        first = convolution.forward(image, kernel, 1)
        return [*(result.detach() for result in (y, joined, logits, value)), first, dweight, *gradients]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        for seed in range(2):
            with torch.no_grad():
                leaves[0].copy_(random(*leaves[0].shape, seed=10 + seed))
                label.copy_(random(*label.shape, seed=seed) > 0)
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            for tensor, reference in zip(captured, eager, strict=True):
                assert torch.equal(tensor, reference)
