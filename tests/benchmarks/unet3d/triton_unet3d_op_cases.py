"""Test memory use, memory formats, special values and errors of 3D U-Net's Triton kernels.

Cases of the operations cannot express them. tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import pytest
import torch
import unet3d_ops_oracle as oracle

from benchmarks.unet3d.ops import instance_norm
from benchmarks.unet3d.ops.dice_cross_entropy import triton as dice_cross_entropy_triton
from benchmarks.unet3d.ops.instance_norm import triton as instance_norm_triton
from benchmarks.unet3d.ops.output_convolution import triton as output_convolution_triton
from benchmarks.unet3d.ops.upsample import triton as upsample_triton
from common.ops import tiling, triton_support
from common.ops.catalogue import cases_of
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPSILON = 1e-5
CHANNELS_LAST = torch.channels_last_3d
CPU = torch.device("cpu")
SMALL = instance_norm_triton.SMALL_TILES


@pytest.fixture
def in_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every volume as large, use small tiles, and report several multiprocessors."""
    for direction, tile in SMALL.items():
        monkeypatch.setitem(SMALL, direction, tile.replace(voxels=0))
    for name, large in instance_norm_triton.TILES.items():
        monkeypatch.setitem(instance_norm_triton.TILES, name, large.replace(elements=512))
    monkeypatch.setattr(triton_support, "multiprocessors", lambda device: 5)


# Norm


@pytest.mark.usefixtures("in_three_launches")
def test_a_large_norm_can_use_several_programs_per_row():
    case = cases_of(instance_norm.INSTANCE_NORM)[0]
    sizes = {"samples": 1, "channels": 48, "volume": (3, 5, 4), "readers": (0, 1)}
    check(instance_norm.INSTANCE_NORM, "triton", case, sizes, torch.float32, CPU)


@pytest.mark.parametrize("small", [True, False])
def test_norm_is_accurate_for_large_means(small, request):
    """In fp32 the mean of squares of such values is known to 0.06 only, and their variance is 1.

    The bias keeps every value above the ReLU's corner, which the rounding of x would move a few across.
    """
    if not small:
        request.getfixturevalue("in_three_launches")
    generator = torch.Generator().manual_seed(0)
    x = 1000 + torch.randn((1, 2, 8, 7, 6), generator=generator)
    case = {"x": x, "weight": torch.ones(2), "bias": torch.full((2,), 8.0)}
    case["dy"] = torch.randn(x.shape, generator=generator)
    found = oracle.values_and_gradients(
        lambda x, weight, bias: instance_norm_triton.instance_norm_relu(x, weight, bias, EPSILON)[0], case
    )
    for name, expected in oracle.instance_norm_relu(**case).items():
        assert oracle.relative_error(found[name], expected) < 1e-4, name


@pytest.mark.usefixtures("in_three_launches")
def test_norm_of_a_constant_volume_is_the_bias():
    x, weight, bias = torch.full((2, 8, 3, 6, 3), 1000.0), torch.full((8,), 3.0), torch.linspace(-1, 1, 8)
    y, _ = instance_norm_triton.instance_norm_relu(x, weight, bias, EPSILON)
    assert torch.equal(y, bias.clamp(min=0).view(1, 8, 1, 1, 1).expand_as(y))


def test_norm_of_a_single_voxel_is_an_error():
    case = oracle.norm_case((2, 8, 1, 1, 1), torch.float32)
    with pytest.raises(ValueError, match="single voxel"):
        instance_norm_triton.instance_norm_relu(case["x"], case["weight"], case["bias"], EPSILON)


def test_both_results_of_a_norm_share_their_memory():
    case = oracle.norm_case((1, 8, 2, 3, 4), torch.float32)
    y, again = instance_norm_triton.instance_norm_relu(case["x"], case["weight"], case["bias"], EPSILON)
    assert y.data_ptr() == again.data_ptr()
    assert y.is_contiguous(memory_format=CHANNELS_LAST)


@pytest.mark.parametrize("channels", [1, 3, 8, 32, 48, 64, 256, 320, 1000])
def test_columns_of_programs_cover_all_channels_without_waste_where_they_can(channels):
    block = tiling.block_of_columns(channels, 64)
    assert block <= 64
    assert block & (block - 1) == 0
    if channels % 16 == 0:
        assert channels % block == 0


# Loss


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST])
def test_the_gradient_of_the_loss_has_the_format_of_the_logits(memory_format):
    case = oracle.loss_case((1, 3, 2, 3, 4), torch.float32)
    logits = case["logits"].contiguous(memory_format=memory_format).requires_grad_()
    dice_cross_entropy_triton.dice_cross_entropy(logits, case["label"], 1e-6).backward()
    assert logits.grad.is_contiguous(memory_format=memory_format)


def test_loss_of_other_class_counts_is_an_error():
    case = oracle.loss_case((1, 4, 2, 2, 2), torch.float32)
    with pytest.raises(ValueError, match="3 classes"):
        dice_cross_entropy_triton.dice_cross_entropy(case["logits"], case["label"], 1e-6)


# Upsampling


def test_upsampling_is_channels_last_and_does_not_copy_the_gradient_of_the_skip():
    case = oracle.upsample_case((2, 8, 3, 4, 5), 4, torch.float32)
    case["dy"] = case["dy"].contiguous(memory_format=CHANNELS_LAST)
    found = oracle.values_and_gradients(upsample_triton.upsample, case)
    assert found["y"].is_contiguous(memory_format=CHANNELS_LAST)
    assert torch.equal(found["y"][:, 4:], case["skip"])
    assert found["skip"].data_ptr() == case["dy"][:, 4:].data_ptr()


def test_only_the_weight_can_need_a_gradient():
    case = oracle.upsample_case((2, 8, 3, 4, 5), 4, torch.float32)
    weight = case["weight"].requires_grad_()
    y = upsample_triton.upsample(case["x"], weight, case["bias"], case["skip"])
    (found,) = torch.autograd.grad(y, weight, case["dy"])
    expected = oracle.upsample(**{name: value.detach() for name, value in case.items()})["weight"]
    assert oracle.relative_error(found, expected) < 2e-6


def test_a_skip_of_another_size_is_an_error():
    case = oracle.upsample_case((1, 2, 2, 2, 2), 3, torch.float32)
    with pytest.raises(ValueError, match=r"a skip of \(1, 3, 1, 4, 4\)"):
        upsample_triton.upsample(case["x"], case["weight"], case["bias"], case["skip"][:, :, :1])


# The last convolution


def test_logits_are_contiguous_and_the_gradient_of_the_input_is_channels_last():
    case = oracle.output_case((2, 5, 3, 4, 2), 3, torch.float32)
    found = oracle.values_and_gradients(output_convolution_triton.output_convolution, case)
    assert found["y"].is_contiguous()
    assert found["x"].is_contiguous(memory_format=CHANNELS_LAST)


@pytest.mark.parametrize(("classes", "channels"), [(17, 8), (3, 65)])
def test_more_classes_or_channels_are_an_error(classes, channels):
    case = oracle.output_case((1, channels, 2, 2, 2), classes, torch.float32)
    with pytest.raises(ValueError, match="hold 64 channels and 16 classes"):
        output_convolution_triton.output_convolution(case["x"], case["weight"], case["bias"])
