"""The Triton way up and last convolution of 3D U-Net against formulas in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
import unet3d_ops_oracle as oracle
from torch import Tensor

from benchmarks.unet3d.ops import output_convolution, upsample
from benchmarks.unet3d.ops.output_convolution import triton as output_convolution_triton
from benchmarks.unet3d.ops.upsample import triton as upsample_triton
from common.ops.operation import AUTO, OperationRequest
from common.ops.tiling import tiles

pytestmark = pytest.mark.usefixtures("bfloat16_products", "poisoned_memory")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
FORMATS = [torch.contiguous_format, torch.channels_last_3d]
CHANNELS_LAST = torch.channels_last_3d


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles on a device of several multiprocessors: a product has several of every kind, a program many."""
    for module in (tiles, output_convolution_triton):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 5)
    products, apart = upsample_triton.FORWARD_TILES, upsample_triton.BACKWARD_TILES
    monkeypatch.setitem(products, "forward", products["forward"]._replace(rows=32, columns=64, channels=16))
    monkeypatch.setitem(apart, "backward", apart["backward"]._replace(elements=1024))
    blocks = output_convolution_triton.TILES
    for name, tile in blocks.items():
        monkeypatch.setitem(blocks, name, tile._replace(voxels=32, programs=1))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """All values are of the dtype and follow the formula."""
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        assert found[name].dtype == dtype, name
        error = oracle.relative_error(found[name], reference)
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


# The way up


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((1, 1, 1, 1, 1), 1),
        ((1, 64, 4, 4, 8), 32),  # full tiles
        ((2, 40, 3, 5, 4), 24),  # channels and voxels are no multiple of a tile's
        ((3, 20, 2, 1, 3), 5),
        ((1, 3, 1, 7, 5), 3),
    ],
)
def test_the_way_up_equals_the_formula(shape: tuple[int, ...], channels: int, dtype: torch.dtype) -> None:
    case = oracle.upsample_case(shape, channels, dtype)
    found = oracle.values_and_gradients(upsample_triton.upsample, case)
    assert found["y"].is_contiguous(memory_format=CHANNELS_LAST)
    assert torch.equal(found["y"][:, channels:], case["skip"])
    assert torch.equal(found["skip"], case["dy"][:, channels:])
    assert_close(found, oracle.upsample(**case), dtype)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_way_up_takes_any_format(memory_format: torch.memory_format) -> None:
    case = oracle.upsample_case((2, 40, 3, 5, 4), 24, torch.float32)
    case = {name: x.contiguous(memory_format=memory_format) if x.ndim == 5 else x for name, x in case.items()}
    found = oracle.values_and_gradients(upsample_triton.upsample, case)
    assert_close(found, oracle.upsample(**case), torch.float32)


def test_the_gradient_of_the_skip_is_not_copied() -> None:
    case = oracle.upsample_case((2, 8, 3, 4, 5), 4, torch.float32)
    case["dy"] = case["dy"].contiguous(memory_format=CHANNELS_LAST)
    found = oracle.values_and_gradients(upsample_triton.upsample, case)
    assert found["skip"].data_ptr() == case["dy"][:, 4:].data_ptr()


def test_the_weight_alone_may_need_a_gradient() -> None:
    case = oracle.upsample_case((2, 8, 3, 4, 5), 4, torch.float32)
    weight = case["weight"].requires_grad_()
    y = upsample_triton.upsample(case["x"], weight, case["bias"], case["skip"])
    (found,) = torch.autograd.grad(y, weight, case["dy"])
    expected = oracle.upsample(**{name: value.detach() for name, value in case.items()})["weight"]
    assert_close({"weight": found}, {"weight": expected}, torch.float32)


def test_a_skip_that_does_not_fit_is_refused() -> None:
    case = oracle.upsample_case((1, 2, 2, 2, 2), 3, torch.float32)
    with pytest.raises(ValueError, match=r"a skip of \(1, 3, 1, 4, 4\)"):
        upsample_triton.upsample(case["x"], case["weight"], case["bias"], case["skip"][:, :, :1])


# The last convolution


def check_output(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, memory_format: torch.memory_format = CHANNELS_LAST
) -> None:
    """Logits and gradients, that of the logits in the given format."""
    case = oracle.output_case(shape, classes, dtype)
    case["dy"] = case["dy"].contiguous(memory_format=memory_format)
    found = oracle.values_and_gradients(output_convolution_triton.output_convolution, case)
    assert found["y"].is_contiguous()
    assert found["x"].is_contiguous(memory_format=CHANNELS_LAST)
    assert_close(found, oracle.output_convolution(**case), dtype)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 32, 4, 8, 8), (3, 5, 3, 5, 7), (7, 33, 5, 3, 2)])
def test_the_last_convolution_equals_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    check_output(shape, 3, dtype, memory_format)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("channels", [7, 64])
@pytest.mark.parametrize("classes", [1, 2, 5, 16])
def test_up_to_16_classes_and_64_channels_are_held(
    classes: int, channels: int, memory_format: torch.memory_format
) -> None:
    check_output((2, channels, 4, 5, 6), classes, torch.float32, memory_format)


def test_strided_logits_gradients_are_taken() -> None:
    """A sum hands back one number that stands for all voxels."""
    case = oracle.output_case((2, 5, 3, 4, 2), 3, torch.float32)
    case["dy"] = torch.full((1, 1, 1, 1, 1), 2.0).expand_as(case["dy"])
    found = oracle.values_and_gradients(output_convolution_triton.output_convolution, case)
    assert_close(found, oracle.output_convolution(**case), torch.float32)


def test_an_input_that_is_not_channels_last_is_taken() -> None:
    case = oracle.output_case((2, 5, 6, 4, 2), 3, torch.float32)
    case["x"], case["dy"] = case["x"][:, :, ::2], case["dy"][:, :, ::2]
    found = oracle.values_and_gradients(output_convolution_triton.output_convolution, case)
    assert_close(found, oracle.output_convolution(**case), torch.float32)


@pytest.mark.parametrize(("classes", "channels"), [(17, 8), (3, 65)])
def test_more_classes_or_channels_are_refused(classes: int, channels: int) -> None:
    case = oracle.output_case((1, channels, 2, 2, 2), classes, torch.float32)
    with pytest.raises(ValueError, match="hold 64 channels and 16 classes"):
        output_convolution_triton.output_convolution(case["x"], case["weight"], case["bias"])


def test_auto_takes_the_kernels() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32, {"channels": 32})
    for operation in (upsample.UPSAMPLE, output_convolution.OUTPUT_CONVOLUTION):
        assert operation.select(AUTO, request).name == "triton"
