"""The plain operations of 3D U-Net against float64 formulas, PyTorch's and MONAI's, cases worked by hand, and split
volumes against whole ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import unet3d_ops_oracle as oracle
from monai.losses import DiceCELoss
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy, output_convolution
from benchmarks.unet3d.ops.dice_cross_entropy import dice_cross_entropy_reference
from benchmarks.unet3d.ops.instance_norm import instance_norm_relu_library, instance_norm_relu_reference
from benchmarks.unet3d.ops.output_convolution import output_convolution_reference
from benchmarks.unet3d.ops.upsample import upsample_reference
from common.errors import UnsupportedImplementation
from common.ops.operation import OperationRequest

EPSILON = 1e-5
SMOOTH = 1e-6
CPU = torch.device("cpu")
NORMS = [instance_norm_relu_reference, instance_norm_relu_library]
Norm = Callable[..., tuple[Tensor, Tensor]]
loss_of = dice_cross_entropy_reference


def norm_and_gradients(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return oracle.values_and_gradients(lambda *leaves: instance_norm_relu_reference(*leaves, EPSILON)[0], case)


# Instance norm


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (3, 8, 5, 4, 3), (2, 5, 2, 9, 1)])
def test_norm_and_its_gradients_equal_the_formula(shape):
    case = oracle.norm_case(shape, torch.float64)
    found = norm_and_gradients(case)
    for name, expected in oracle.instance_norm_relu(**case).items():
        assert oracle.relative_error(found[name], expected) < 1e-10, name


def test_norm_is_accurate_for_large_means():
    """In fp32 the mean of squares of such values is known to 0.06 only, and their variance is 1."""
    case = oracle.norm_case((1, 4, 16, 16, 16), torch.float32, mean=1000.0)
    expected = oracle.instance_norm_relu(**case)["y"]
    found, _ = instance_norm_relu_reference(case["x"], case["weight"], case["bias"], EPSILON)
    assert oracle.relative_error(found, expected) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norm_accepts_fp32_parameters(dtype):
    case = {name: value.to(dtype) for name, value in oracle.norm_case((2, 8, 6, 5, 4), dtype).items()}
    case |= {name: case[name].float() for name in ("weight", "bias")}
    found = norm_and_gradients(case)
    assert found["y"].dtype == found["x"].dtype == dtype
    assert found["weight"].dtype == found["bias"].dtype == torch.float32
    for name, expected in oracle.instance_norm_relu(**case).items():
        assert oracle.relative_error(found[name], expected) < 1e-2, name


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_norm_keeps_the_memory_format(norm, memory_format):
    case = oracle.norm_case((2, 8, 6, 5, 4), torch.float32)
    y, _ = norm(case["x"].contiguous(memory_format=memory_format), case["weight"], case["bias"], EPSILON)
    assert y.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("norm", NORMS)
def test_norm_of_a_single_voxel_is_an_error(norm):
    case = oracle.norm_case((2, 8, 1, 1, 1), torch.float32)
    with pytest.raises(ValueError, match="single voxel"):
        norm(case["x"], case["weight"], case["bias"], EPSILON)


# The way up and the last convolution


@pytest.mark.parametrize(("shape", "channels"), [((1, 1, 1, 1, 1), 1), ((3, 5, 4, 3, 2), 2), ((2, 2, 1, 3, 2), 7)])
def test_upsampling_and_its_gradients_equal_the_formula(shape, channels):
    case = oracle.upsample_case(shape, channels, torch.float64)
    found = oracle.values_and_gradients(upsample_reference, case)
    for name, expected in oracle.upsample(**case).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        ((slice(None), slice(None), slice(1)), (1, 3, 1, 4, 4)),
        ((slice(None), slice(2)), (1, 2, 4, 4, 4)),
    ],
    ids=["size", "channels"],
)
def test_a_skip_of_another_size_is_an_error(cut, shape):
    case = oracle.upsample_case((1, 2, 2, 2, 2), 3, torch.float32)
    message = f"a skip of {shape} where the upsampled volume is (1, 3, 4, 4, 4)"
    with pytest.raises(ValueError, match=re.escape(message)):
        upsample_reference(case["x"], case["weight"], case["bias"], case["skip"][cut])


@pytest.mark.parametrize(("shape", "classes"), [((1, 1, 1, 1, 1), 1), ((3, 5, 4, 3, 2), 3), ((2, 2, 1, 3, 2), 17)])
def test_the_last_convolution_and_its_gradients_equal_the_formula(shape, classes):
    case = oracle.output_case(shape, classes, torch.float64)
    found = oracle.values_and_gradients(output_convolution_reference, case)
    for name, expected in oracle.output_convolution(**case).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12, msg=name)


# Loss


@pytest.mark.parametrize("shape", [(1, 3, 1, 1, 1), (3, 3, 5, 4, 3), (2, 5, 4, 3, 2)])
def test_loss_and_its_gradient_equal_the_formula(shape):
    case = oracle.loss_case(shape, torch.float64)
    logits = case["logits"].requires_grad_()
    loss = loss_of(logits, case["label"], SMOOTH)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = oracle.dice_cross_entropy(logits.detach(), case["label"])
    torch.testing.assert_close(loss.detach(), expected["loss"], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected["logits"], rtol=1e-9, atol=1e-14)


def test_loss_equals_monais():
    case = oracle.loss_case((3, 3, 6, 5, 4), torch.float64)
    monais = DiceCELoss(
        include_background=False, softmax=True, to_onehot_y=True, smooth_nr=SMOOTH, smooth_dr=SMOOTH,
        lambda_dice=0.5, lambda_ce=0.5,
    )  # fmt: skip
    expected = monais(case["logits"], case["label"].unsqueeze(1).long())
    torch.testing.assert_close(loss_of(case["logits"], case["label"], SMOOTH), expected, rtol=1e-12, atol=0)


def label_with_fractions(voxels: int, *counts: int) -> Tensor:
    """(1, 1, 1, voxels): so many of class 1, so many of class 2, the rest background."""
    label = torch.zeros(1, 1, 1, voxels, dtype=torch.uint8)
    label[..., : counts[0]] = 1
    label[..., counts[0] : sum(counts)] = 2
    return label


def test_absent_classes_that_are_not_predicted_have_dice_one():
    """Both sums are 0, so that smooth / smooth is left: the smoothing is in the numerator too."""
    label = label_with_fractions(100, 0, 0)
    logits = torch.zeros(1, 3, 1, 1, 100, dtype=torch.float64)
    logits[:, 0] = 200
    assert float(loss_of(logits, label, SMOOTH)) == pytest.approx(0, abs=1e-9)


def test_predictions_of_absent_classes_have_dice_zero():
    loss = loss_of(torch.zeros(1, 3, 1, 1, 1000, dtype=torch.float64), label_with_fractions(1000, 0, 0), SMOOTH)
    assert float(loss) == pytest.approx((1 + math.log(3)) / 2, abs=1e-8)


def test_loss_of_half_precision_logits_equals_that_in_fp32():
    case = oracle.loss_case((2, 3, 8, 8, 8), torch.bfloat16)
    loss = loss_of(case["logits"], case["label"], SMOOTH)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(oracle.dice_cross_entropy(**case)["loss"]), rel=1e-6)


def test_labels_of_another_shape_are_an_error():
    case = oracle.loss_case((2, 3, 4, 4, 4), torch.float32)
    with pytest.raises(ValueError, match=r"\(2, 1, 4, 4, 4\)"):
        loss_of(case["logits"], case["label"].unsqueeze(1), SMOOTH)


# Choices


def test_the_loss_kernels_require_three_classes():
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedImplementation, match="3 classes, not 4"):
        dice_cross_entropy.DICE_CROSS_ENTROPY.select("triton", OperationRequest(CPU, torch.float32, {"classes": 4}))


def test_the_kernels_of_the_last_convolution_allow_64_channels():
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedImplementation, match="channels is at most 64, not 65"):
        output_convolution.OUTPUT_CONVOLUTION.select("triton", OperationRequest(CPU, torch.float32, {"channels": 65}))


# Split volumes


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_volumes_equal_whole_volumes(ranks, tmp_path):
    norm, loss = oracle.norm_case((2, 5, 8, 3, 4), torch.float64), oracle.loss_case((3, 3, 8, 3, 4), torch.float64)
    cases = {"norm": norm, "loss": loss, "implementations": {"norm": ["reference", "library"], "loss": ["reference"]}}
    found = oracle.run_ranks(tmp_path, ranks, cases)
    for name in cases["implementations"]["norm"]:
        whole = oracle.joined([part["norm"][name] for part in found])
        for value, expected in oracle.instance_norm_relu(**norm).items():
            assert oracle.relative_error(whole[value], expected) < 1e-12, (name, value)
    whole = oracle.joined([part["loss"]["reference"] for part in found])
    for value, expected in oracle.dice_cross_entropy(**loss).items():
        assert oracle.relative_error(whole[value], expected) < 1e-12, value
