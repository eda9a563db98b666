"""Mask R-CNN's network: parity with torchvision, counts of the rules' model, initial weights, memory, precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.heads import RegionLinear
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.proposals import anchors, level_sizes
from common.mlperf.fixed import fixed_facts
from common.nn.convolution import LayerFlops
from common.nn.frozen import frozen_names
from common.nn.fused_convolution import FusedConv2d
from tests.benchmarks.maskrcnn.torchvision_parts import FROZEN, Parts

REAL = fixed_facts(Facts, "maskrcnn")
NARROW = replace(REAL, classes=3, layers=(1, 2, 1, 1), pyramid_channels=8, box_channels=24, mask_convolutions=2)
"""torchvision's stem has 64 channels always."""
SMALL = replace(NARROW, width=8, mask_convolutions=1)


def build(facts: Facts) -> MaskRCNN:
    return MaskRCNN(facts, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def initial() -> MaskRCNN:
    return build(replace(REAL, classes=30, layers=(1, 1, 1, 1), pyramid_channels=64, box_channels=128))


def on_meta(facts: Facts) -> MaskRCNN:
    with torch.device("meta"):
        return build(facts)


def masks_of_all_classes(network: MaskRCNN, x_RCSS: Tensor) -> Tensor:
    """(R, K + 1, 2 S, 2 S)."""
    kinds = len(network.mask_head.mask_fcn_logits.weight)
    return torch.stack([network.mask_head(x_RCSS, torch.full((len(x_RCSS),), own)) for own in range(kinds)], 1)


def outputs_of(network: MaskRCNN, image: Tensor, boxes: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """Every result of the network, by name."""
    levels = network.pyramid(image)
    found = {f"P{number}": level for number, level in enumerate(levels, 2)}
    for number, output in enumerate(network.propose(levels), 2):
        found |= {f"logits {number}": output.logits_NAHW, f"deltas {number}": output.deltas_NAHW}
    classes, deltas = network.box_head(boxes)
    return found | {"classes": classes, "boxes": deltas, "masks": masks_of_all_classes(network, masks)}


def torchvision_outputs(parts: Parts, image: Tensor, boxes: Tensor, masks: Tensor) -> dict[str, Tensor]:
    levels = parts.pyramid(image)
    found = {f"P{number}": level for number, level in enumerate(levels, 2)}
    for number, (logits, deltas) in enumerate(zip(*parts.rpn(levels), strict=True), 2):
        found |= {f"logits {number}": logits, f"deltas {number}": deltas}
    classes, deltas = parts.boxes(boxes)
    return found | {"classes": classes, "boxes": deltas, "masks": parts.masks(masks)}


def inputs(facts: Facts, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A picture, and features of three regions for either head, which want gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 3, 64, 96)]
    shapes += [(3, facts.pyramid_channels, side, side) for side in (facts.box_resolution, facts.mask_resolution)]
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [
        value.contiguous(memory_format=torch.channels_last).requires_grad_(index > 0)
        for index, value in enumerate(values)
    ]


def test_every_part_and_every_gradient_equals_torchvisions():
    torch.manual_seed(0)
    theirs, ours = Parts(NARROW).double(), build(NARROW).cast(torch.float64)
    ours.load_state_dict(theirs.ours(NARROW))
    mine, others = inputs(NARROW), inputs(NARROW)
    found, expected = outputs_of(ours, *mine), torchvision_outputs(theirs, *others)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert (value - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name
    weights = {name: torch.randn_like(value) for name, value in expected.items()}
    for results in (found, expected):
        sum((value * weights[name]).sum() for name, value in results.items()).backward()
    gradients = theirs.ours(NARROW, gradients=True)
    assert gradients.keys() == {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    for name, gradient in gradients.items():
        error = (ours.get_parameter(name).grad - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-11, f"{name}: {error:.1e}"
    for value, other in zip(mine[1:], others[1:], strict=True):
        assert (value.grad - other.grad).abs().max() <= 1e-12 * other.grad.abs().max()


def test_parameters_are_as_many_as_the_rules_model_has():
    network = on_meta(REAL)
    counts = dict.fromkeys((True, False), 0)
    for name, parameter in network.named_parameters():
        counts[name.startswith(FROZEN)] += parameter.numel()
        assert parameter.requires_grad != name.startswith(FROZEN), name
    assert counts == {False: 44_125_173, True: 222_400}
    assert sum(buffer.numel() for buffer in network.buffers()) == 4 * 26_560


def test_flops_are_those_of_the_rules_model():
    layers = on_meta(REAL).flops((800, 1344), boxes=512, masks=128)

    def of(*prefixes: str) -> LayerFlops:
        chosen = [layer for layer in layers if layer.name.startswith(prefixes)]
        return LayerFlops("", sum(layer.forward for layer in chosen), sum(layer.training for layer in chosen))

    # part, multiply-adds forward, FLOPs of training, both in units of 1e9
    table = [
        (of("body.conv1"), 2.53, 5.1),
        (of("body.layer1"), 14.31, 28.6),
        (of("body.layer2"), 20.37, 116.7),
        (of("body.layer3"), 29.73, 178.4),
        (of("body.layer4"), 15.69, 94.1),
        (of("fpn.inner"), 8.26, 40.7),
        (of("fpn.layer"), 52.64, 315.9),
        (of("rpn"), 53.15, 318.9),
        (of("box_head"), 7.33, 44.0),
        (of("mask_head"), 67.85, 407.1),
    ]
    for part, (found, multiply_adds, training) in enumerate(table):
        assert found.forward / 2e9 == pytest.approx(multiply_adds, abs=0.006), part
        assert found.training / 1e9 == pytest.approx(training, abs=0.06), part
    assert sum(layer.training for layer in layers) == pytest.approx(1.549e12, rel=5e-4)
    assert sum(found.training for found, _, _ in table) == on_meta(REAL).sample_flops((800, 1344), 512, 128)


@pytest.mark.parametrize(
    ("name", "standard_deviation"),
    [
        ("backbone.fpn.inner_blocks.1", 512**-0.5),
        ("backbone.fpn.layer_blocks.0", (64 * 9) ** -0.5),
        ("rpn.conv", 0.01),
        ("rpn.cls_logits", 0.01),
        ("rpn.bbox_pred", 0.01),
        ("box_head.fc6", (64 * 49) ** -0.5),
        ("box_head.fc7", 128**-0.5),
        ("box_head.cls_score", 0.01),
        ("box_head.bbox_pred", 0.001),
        ("mask_head.convolutions.mask_fcn1", (2 / (64 * 9)) ** 0.5),
        ("mask_head.conv5_mask", (2 / (64 * 4)) ** 0.5),
        ("mask_head.mask_fcn_logits", (2 / 31) ** 0.5),
    ],
)
def test_initial_weights_are_those_of_the_reference(initial, name, standard_deviation):
    layer = initial.get_submodule(name)
    values = layer.weight.flatten()
    assert values.std().item() == pytest.approx(standard_deviation, rel=5 / len(values) ** 0.5)
    assert abs(values.mean().item()) < 5 * standard_deviation / len(values) ** 0.5
    # uniform within the bound b has the standard deviation b / sqrt(3); no normal one stays within 2 of them
    uniform = name.startswith(("backbone.fpn", "box_head.fc"))
    assert (values.abs().max().item() <= 3**0.5 * standard_deviation) == uniform
    assert not layer.bias.any()


def test_frozen_tensors_are_marked_as_such():
    network = build(SMALL)
    frozen = {name for name, _ in network.named_parameters() if name.startswith(FROZEN)}
    assert frozen | {name for name, _ in network.named_buffers()} == frozen_names(network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposals_are_in_the_order_of_the_anchors_without_a_copy(dtype):
    """Row i, column j and ratio a have index (i x width + j) x 3 + a."""
    network = build(SMALL).cast(dtype)
    size = (64, 96)
    outputs = network.propose(network.pyramid(torch.randn(2, 3, *size, dtype=dtype)))
    assert [output.logits_NAHW.shape[2:] for output in outputs] == level_sizes(size)
    for output, anchors_A4 in zip(outputs, anchors(SMALL, size), strict=True):
        logits, deltas = output.flat()
        assert logits.shape == (2, len(anchors_A4))
        assert deltas.shape == (2, len(anchors_A4), 4)
        assert logits.data_ptr() == output.logits_NAHW.data_ptr()
        assert deltas.data_ptr() == output.deltas_NAHW.data_ptr()
        width = output.logits_NAHW.shape[3]
        for i, j, a in ((0, 0, 0), (output.logits_NAHW.shape[2] - 1, width - 1, 2)):
            at = (i * width + j) * 3 + a
            assert logits[1, at] == output.logits_NAHW[1, a, i, j]
            assert torch.equal(deltas[1, at], output.deltas_NAHW[1, 4 * a : 4 * a + 4, i, j])


def test_half_precision_keeps_norms_in_fp32_and_weights_channels_last():
    torch.manual_seed(0)
    exact = build(SMALL)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if not name.startswith("backbone.body."):  # whose activations do not vanish by themselves
                parameter.normal_(0.0, 0.1)
    network = build(SMALL)
    network.load_state_dict(exact.state_dict())
    network.cast(torch.bfloat16)
    references = {"convolution": "reference", "selected_logits": "reference"}
    assert network.choose_implementations(references) == references
    layers = [layer for layer in network.modules() if isinstance(layer, (FusedConv2d, RegionLinear))]
    assert all("implementation=reference" in layer.extra_repr() for layer in layers)
    values = inputs(SMALL, torch.float32)
    found = outputs_of(network, *(value.detach().bfloat16() for value in values))
    for name, expected in outputs_of(exact, *values).items():
        assert found[name].dtype == (torch.float32 if name == "masks" else torch.bfloat16), name
        assert (found[name].float() - expected).norm() < 0.03 * expected.norm(), name
        if found[name].dim() == 4 and name != "masks":
            assert found[name].is_contiguous(memory_format=torch.channels_last), name
    sum(value.float().square().mean() for value in found.values()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert (parameter.grad is None) == name.startswith(FROZEN), name
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name
    assert {buffer.dtype for buffer in network.buffers()} == {torch.float32}


def test_no_regions_have_no_results():
    network = build(SMALL)
    _, *regions = inputs(SMALL, torch.float32)
    classes, deltas = network.box_head(regions[0][:0])
    assert (classes.shape, deltas.shape) == ((0, 4), (0, 16))
    assert network.mask_head(regions[1][:0], torch.empty(0, dtype=torch.int64)).shape == (0, 28, 28)
