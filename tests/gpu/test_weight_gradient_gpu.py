"""Test weight gradients on a GPU: captured FP8 sums, 16-bit sums, and products of trained layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from common.language.decoder import product_of
from common.language.fp8_products import Fp8TrainedProduct
from common.language.products import Scratch, Shared, WeightCasts
from common.ops import weight_gradient
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, widen_fp8
from common.ops.operation import OperationRequest
from common.ops.weight_gradient import add_product_
from tests.gpu.support import WITH_FP8, captured, relative_error

pytestmark = [pytest.mark.gpu, WITH_FP8]

GPU = torch.device("cuda")
NAMES = pytest.mark.parametrize("name", weight_gradient.WEIGHT_GRADIENT.names)
SHAPES = [(1024, 512, 4096), (1040, 528, 1008), (48, 32, 64), (6144, 4096, 8192)]
"""Outputs, inputs and tokens. The second and the third shape fit no tile."""


def accumulate_of(name: str, dtype: torch.dtype) -> Callable[..., None]:
    reason = weight_gradient.WEIGHT_GRADIENT.unsupported(name, OperationRequest(GPU, dtype))
    if reason is not None:
        pytest.skip(reason)
    function: Callable[..., None] = weight_gradient.WEIGHT_GRADIENT.function(name)
    return function


def operands(outputs: int, inputs: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dy, x and the inverses of their scales. The mean of the product is not 0, so that a partial sum would
    show."""
    generator = torch.Generator(GPU).manual_seed(tokens)
    dy, x = (torch.randn(rows, tokens, generator=generator, device=GPU) + 0.25 for rows in (outputs, inputs))
    inverses = (torch.full((), value, device=GPU) for value in (1.0 / 4096, 1.0 / 64))
    return (dy * 4096).to(E5M2), (x * 64).to(E4M3), *inverses


def product(dy: Tensor, x: Tensor, dy_inverse: Tensor, x_inverse: Tensor) -> Tensor:
    return ((dy.double() @ x.double().t()) * dy_inverse.double() * x_inverse.double()).float()


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory filled with NaN (or 127), which would show in results."""
    return torch.full(tuple(shape), 127 if dtype == torch.uint8 else float("nan"), dtype=dtype, device=GPU)


@NAMES
def test_a_captured_sum_goes_on(name: str) -> None:
    accumulate, given = accumulate_of(name, torch.bfloat16), operands(768, 512, 2048)
    gradient, scratch = torch.zeros(768, 512, dtype=torch.bfloat16, device=GPU), Scratch(GPU)

    def own(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return scratch.slot("allocate", shape, dtype)

    graph, _ = captured(lambda: accumulate(*given, gradient, own))
    for _ in range(2):
        graph.replay()
    assert relative_error(gradient, 4.0 * product(*given)) < 2**-6


def test_what_cublaslt_would_misread_is_refused() -> None:
    accumulate, given = accumulate_of("cublaslt", torch.bfloat16), operands(256, 512, 1024)
    bucket = torch.ones(256 * 512 + 1, dtype=torch.bfloat16, device=GPU)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        accumulate(*given, bucket[1:].view(256, 512), allocate)
    with pytest.raises(ValueError, match="isn't"):
        accumulate(*given, bucket[:-1].view(512, 256), allocate)


# Products


class Holder(nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, device=GPU).mul_(0.05).bfloat16())
        self.bias = nn.Parameter(torch.randn(outputs, device=GPU).bfloat16())


# Products in 16 bits


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_in_16_bits_add_up(shape: tuple[int, int, int], wide: bool, half: torch.dtype) -> None:
    """In fp32, only sums are rounded. The former content of the gradient stays part of the sum, also in a graph."""
    outputs, inputs, tokens = shape
    generator = torch.Generator(GPU).manual_seed(tokens)
    dy, x = (torch.randn(tokens, width, generator=generator, device=GPU).add_(0.25) for width in (outputs, inputs))
    dy, x = dy.mul_(2.0**-6).to(half), x.mul_(2.0**-4).to(half)
    gradient = torch.ones(outputs, inputs, dtype=torch.float32 if wide else half, device=GPU)
    graph, _ = captured(lambda: add_product_(gradient, dy, x))
    for _ in range(14):
        graph.replay()
    found = relative_error(gradient, 1.0 + 16.0 * (dy.double().t() @ x.double()))
    print(f"{half} into {gradient.dtype}: {found:.1e}")
    assert found < (2e-4 if wide else 2**-5)


@NAMES
@pytest.mark.parametrize(
    ("dtype", "keep_transposed"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
def test_trained_products_are_those_of_their_operands(name: str, dtype: torch.dtype, keep_transposed: bool) -> None:
    accumulate_of(name, dtype)
    torch.manual_seed(0)
    layer, shared = Holder(768, 512), Shared(Scratch(GPU), WeightCasts(), accumulation=name)
    layer.weight.grad_dtype = dtype
    product_8 = product_of(layer, "fp8", shared, keep_transposed)
    assert isinstance(product_8, Fp8TrainedProduct)
    assert product_8._accumulate is weight_gradient.WEIGHT_GRADIENT.function(name)
    x, dy = torch.randn(1024, 512, device=GPU).bfloat16(), torch.randn(1024, 768, device=GPU).mul_(1e-3).bfloat16()
    shared.begin(False)
    x8, dy8 = product_8.cast_input(x, False), product_8.cast_gradient(dy)
    assert isinstance(x8, Fp8Tensor)
    assert isinstance(dy8, Fp8Tensor)
    wide_x, wide_dy = widen_fp8(x8).double(), widen_fp8(dy8).double()
    weight = layer.weight.detach().double()
    y = product_8.multiply(x8)
    assert relative_error(y, wide_x @ weight.t() + layer.bias.detach().double()) < 0.03
    for again, operand in enumerate((x8, product_8.cast_again(x, x8.scale_inverse)), 1):
        assert relative_error(product_8.movement.backward(product_8, dy8, operand), wide_dy @ weight) < 0.03
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == dtype
        assert relative_error(layer.weight.grad, again * wide_dy.t() @ wide_x) < 2**-7
    assert layer.bias.grad is None


def test_a_bias_in_16_bits_is_added_by_the_product() -> None:
    torch.manual_seed(0)
    layer, x = Holder(768, 512), torch.randn(256, 512, device=GPU).bfloat16()
    product_16 = product_of(layer, "torch", Shared(Scratch(GPU), WeightCasts()))
    wanted = x.double() @ layer.weight.detach().double().t() + layer.bias.detach().double()
    assert relative_error(product_16.multiply(x), wanted) < 2**-8
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        product_16.multiply(x)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels
    assert not [event.name for event in kernels if "elementwise" in event.name.lower()], "a pass for the bias alone"
