"""3D U-Net's Triton operations on a GPU: against float64 at layer sizes, captured, repeatable, and without overflow of
offsets in large tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm

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
    result: Tensor = instance_norm.IMPLEMENTATIONS["triton"].function(x, weight, bias, EPSILON)
    return result


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return instance_norm.instance_norm_relu_plain(x, weight, bias, EPSILON)


def loss(logits: Tensor, label: Tensor) -> Tensor:
    result: Tensor = dice_cross_entropy.IMPLEMENTATIONS["triton"].function(logits, label, SMOOTH)
    return result


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in inputs]
    poison()
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


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
    for name, value, reference in zip(("y", "x", "weight", "bias"), found, expected, strict=True):
        error = (value.double() - reference).norm() / reference.norm()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


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
        lambda leaf: dice_cross_entropy.dice_cross_entropy_plain(leaf, label, SMOOTH), [logits.double()], scale.double()
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert gradient.is_contiguous(memory_format=memory_format)
    assert (gradient.double() - reference).norm() < TOLERANCE[dtype] * reference.norm()


def test_operations_are_captured_and_give_the_same_bits_in_every_run() -> None:
    inputs, dy = norm_inputs((2, 32, 48, 48, 48), torch.bfloat16, torch.float32)
    logits = random(2, 3, 48, 48, 48, dtype=torch.bfloat16).contiguous(memory_format=CHANNELS_LAST)
    label = torch.zeros((2, 48, 48, 48), device="cuda", dtype=torch.uint8)
    leaves = [value.requires_grad_() for value in inputs]
    logits.requires_grad_()

    def step() -> list[Tensor]:
        y, value = norm(*leaves), loss(logits, label)
        gradients = (*torch.autograd.grad(y, leaves, dy), *torch.autograd.grad(value, logits))
        return [y.detach(), value.detach(), *gradients]

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
