"""RetinaNet's network: parity with torchvision, counts of the rules' table, what is frozen, memory, precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

from benchmarks.retinanet.model import Architecture, RetinaNet, anchors, level_sizes
from common.nn.frozen import frozen_names
from tests.benchmarks.retinanet import torchvision_network

REAL = Architecture(
    classes=264,
    norm_epsilon=1e-5,
    prior=0.01,
    layers=(3, 4, 6, 3),
    width=64,
    groups=32,
    width_per_group=4,
    trained_stages=3,
    pyramid_channels=256,
    head_convolutions=4,
)
NARROW = replace(REAL, classes=5, layers=(1, 2, 2, 1), groups=4, width_per_group=4, pyramid_channels=16)
"""torchvision's stem has 64 channels always."""

SMALL = replace(NARROW, width=8, head_convolutions=1)


def build(architecture: Architecture) -> RetinaNet:
    return RetinaNet(architecture, torch.Generator().manual_seed(0))


def all_levels(network: RetinaNet, image_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Logits with their bias (N, A, K) and offsets (N, A, 4) of all levels."""
    levels = [output.flat() for output in network(image_NCHW)]
    logits, offsets = (torch.cat(values, 1) for values in zip(*levels, strict=True))
    return logits + network.logit_bias.view(-1, logits.shape[2]).repeat(logits.shape[1] // 9, 1), offsets


def both(architecture: Architecture, image_size: int, dtype: torch.dtype) -> tuple[RetinaNet, nn.Module, Tensor]:
    """Our network and torchvision's with the same random weights, and an image."""
    torch.manual_seed(0)
    theirs = torchvision_network.build(architecture, image_size).to(dtype)
    ours = build(architecture).cast(dtype)
    ours.load_state_dict(torchvision_network.reference_state(theirs))
    return ours, theirs, torch.randn(1, 3, image_size, image_size, dtype=dtype)


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    for name, value, other in zip(("logits", "offsets"), found, expected, strict=True):
        assert value.shape == other.shape
        assert (value - other).abs().max() <= tolerance * other.abs().max(), name


# In fp32 with few activations: one that rounds to the other side of a ReLU moves gradients by far more than rounding.
@pytest.mark.parametrize(("image_size", "dtype", "tolerance"), [(320, torch.float64, 1e-12), (96, torch.float32, 1e-5)])
def test_outputs_and_gradients_equal_torchvision(image_size, dtype, tolerance):
    ours, theirs, image = both(NARROW, image_size, dtype)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    found, expected = all_levels(ours, image), torchvision_network.outputs(theirs, image)
    assert_equal(found, expected, tolerance)
    weights = [torch.randn_like(value) for value in expected]
    for values in (found, expected):
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    gradients = {torchvision_network.reference_name(name): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected_gradient = gradients[name]
        assert (parameter.grad is None) == (expected_gradient is None), name
        if expected_gradient is not None:
            error = (parameter.grad - expected_gradient).abs().max() / expected_gradient.abs().max()
            assert error <= tolerance, f"{name}: {error:.1e}"
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@pytest.mark.slow
def test_fp32_outputs_equal_torchvision_at_full_width():
    ours, theirs, image = both(REAL, 320, torch.float32)
    with torch.no_grad():
        assert_equal(all_levels(ours, image), torchvision_network.outputs(theirs, image), 1e-5)


def test_parameters_and_names_are_those_of_the_reference():
    with torch.device("meta"):
        ours, theirs = build(REAL), torchvision_network.build(REAL, 800)
    assert sum(p.numel() for p in ours.parameters()) == 37_060_652
    assert sum(p.numel() for p in ours.parameters() if p.requires_grad) == 36_849_004
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in torchvision_network.reference_state(theirs).items()
    }
    norms = [name for name in ours.state_dict() if name.endswith("running_var")]
    assert sum(ours.get_buffer(name).numel() for name in norms) == 34_112
    for name in ("conv.6", "cls_logits"):
        assert ours.get_parameter(f"head.classification_head.{name}.bias").dim() == 1


def test_flops_are_those_of_the_rules_model():
    with torch.device("meta"):
        network = build(REAL)
    assert sum(layer.forward for layer in network.flops(800)) == pytest.approx(402.4e9, rel=1e-3)
    assert network.sample_flops(800) == pytest.approx(1161e9, rel=1e-3)


def test_initial_weights_are_those_of_the_reference():
    network = build(REAL)
    for name, module in network.head.named_modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.std().item() == pytest.approx(0.01, rel=0.02), name
            expected = math.log(0.01 / 0.99) if name.endswith("cls_logits") else 0.0
            assert torch.allclose(module.bias, torch.tensor(expected)), name
    assert network.logit_bias[0].item() == pytest.approx(-4.59512, abs=1e-5)
    for name, module in network.backbone.fpn.named_modules():
        if isinstance(module, nn.Conv2d):
            bound = (3 / module.weight[0].numel()) ** 0.5
            assert bound * 0.99 < module.weight.abs().max() <= bound, name
            assert not module.bias.any(), name


def test_stem_and_first_stage_are_frozen_however_the_network_is_made():
    """The reference's helper trains them where it is built without a backbone file."""
    network = build(SMALL)
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in network.named_parameters() if name.startswith(torchvision_network.FROZEN)}
    assert frozen | {name for name, _ in network.named_buffers()} == frozen_names(network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_are_anchors_by_classes_without_a_copy(dtype):
    network = build(SMALL).cast(dtype)
    found = network(torch.randn(2, 3, 96, 96, dtype=dtype))
    assert [output.logits_NCHW.shape[2:] for output in found] == [(size, size) for size in level_sizes(96)]
    total = 0
    for output in found:
        logits_NAK, offsets_NA4 = output.flat()
        assert logits_NAK.data_ptr() == output.logits_NCHW.data_ptr()
        assert offsets_NA4.data_ptr() == output.offsets_NCHW.data_ptr()
        assert logits_NAK.is_contiguous()
        assert offsets_NA4.is_contiguous()
        assert logits_NAK.shape[1:] == (offsets_NA4.shape[1], 5)
        total += offsets_NA4.shape[1]
    assert total == len(anchors(96))


def test_half_precision_keeps_norms_in_fp32_and_weights_channels_last():
    torch.manual_seed(0)
    exact = build(SMALL)
    network = build(SMALL).cast(torch.bfloat16)
    assert network.choose_implementations({"convolution": "reference"}) == {"convolution": "reference"}
    image = torch.randn(1, 3, 64, 64)
    found, expected = all_levels(network, image.bfloat16()), all_levels(exact, image)
    for value, other in zip(found, expected, strict=True):
        assert value.dtype == torch.bfloat16
        assert (value.float() - other).norm() < 0.02 * other.norm()
    sum(value.float().square().mean() for value in found).backward()
    for name, parameter in network.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert parameter.grad is None or parameter.grad.dtype == torch.bfloat16, name
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name
    assert {buffer.dtype for buffer in network.buffers()} == {torch.float32}


@pytest.mark.parametrize("image_size", [32, 128, 300, 320, 800, 801])
def test_anchors_are_those_of_torchvision(image_size):
    sizes = tuple((s, int(s * 2 ** (1 / 3)), int(s * 2 ** (2 / 3))) for s in (32, 64, 128, 256, 512))
    generator = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
    images = ImageList(torch.zeros(1, 3, image_size, image_size), [(image_size, image_size)])
    expected = generator(images, [torch.zeros(1, 1, size, size) for size in level_sizes(image_size)])[0]
    found = anchors(image_size)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_level_sizes_of_the_benchmark():
    assert level_sizes(800) == (100, 50, 25, 13, 7)
    assert sum(size**2 for size in level_sizes(800)) == 13_343
