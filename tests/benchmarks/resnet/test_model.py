"""ResNet-50: parity with torchvision, counts of the rules' table, initial weights, loss, precision."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from benchmarks.resnet.config import Facts
from benchmarks.resnet.model import ResNet50, smoothed_cross_entropy
from common.mlperf.fixed import fixed_facts

FOURTH_SLICE = 64 * 7 * 7


def build(seed: int = 0, truncated_normal: bool = False, **shape: object) -> ResNet50:
    architecture = replace(fixed_facts(Facts, "resnet").architecture(64), **shape)
    return ResNet50(architecture, torch.Generator().manual_seed(seed), truncated_normal)


@pytest.fixture(scope="module")
def model() -> ResNet50:
    """A model that tests do not change."""
    return build()


def test_parameters_are_those_of_the_reference(model):
    assert sum(p.numel() for p in model.parameters()) - FOURTH_SLICE == 25_557_032
    assert len(list(model.parameters())) == 161
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 53


def test_names_are_those_of_torchvision(model):
    theirs = [name for name in torchvision.models.resnet50().state_dict() if "num_batches_tracked" not in name]
    assert sorted(model.state_dict()) == sorted(theirs)


def test_logits_and_gradients_equal_torchvision():
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=17).double()
    ours = build(classes=17).double()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    label = torch.tensor([1, 2, 16])
    padded = F.pad(image, (0, 0, 0, 0, 0, 1)).contiguous(memory_format=torch.channels_last)
    logits, expected = ours(padded), theirs(image)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-10)
    smoothed_cross_entropy(logits, label, 0.1, "sum").backward()
    nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(expected, label).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        found = parameter.grad[:, :3] if name == "conv1.weight" else parameter.grad
        assert torch.allclose(found, gradients[name], rtol=1e-7, atol=1e-9), name
    assert not ours.conv1.weight.grad[:, 3].any()
    for name, value in ours.named_buffers():
        assert torch.allclose(value, theirs.state_dict()[name]), name


def test_fp32_logits_equal_torchvision_in_evaluation():
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50().eval()
    ours = build().eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs(image)
        # 53 layers that each sum up to 4,608 products; norms with an epsilon of 1e-4 would make 1e-3
        assert (ours(image) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_three_channels_give_what_a_zero_fourth_gives(model):
    narrow = copy.deepcopy(model).eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(narrow(image), narrow(F.pad(image, (0, 0, 0, 0, 0, 1))), atol=1e-5)


def test_flops_of_a_training_sample(model):
    # 4.089 GMAC forward, three times, less the gradient of conv1's input (0.118 GMAC)
    assert model.sample_flops(224) == pytest.approx(2 * (3 * 4.089e9 - 0.118e9), rel=1e-3)
    assert model.sample_flops(224) == pytest.approx(24.3e9, rel=1e-3)


@pytest.mark.parametrize("truncated_normal", [False, True])
def test_initial_convolutions_are_he_normal_over_fan_in(truncated_normal):
    model = build(truncated_normal=truncated_normal)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight[:, :3] if name == "conv1" else module.weight
            expected = math.sqrt(2 / weight[0].numel())
            slack = 5 / math.sqrt(weight.numel())
            assert weight.std().item() == pytest.approx(expected, rel=slack), name
            assert abs(weight.mean().item()) < expected * slack, name
            if truncated_normal:
                assert weight.abs().max() <= 2 * expected / 0.8796, name
    assert not model.conv1.weight[:, 3].any()


def test_initial_classifier_and_norms(model):
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert not model.fc.bias.any()
    norms = {name: p for name, p in model.named_parameters() if "bn" in name or "downsample.1" in name}
    assert len(norms) == 106
    assert all((p == (1.0 if name.endswith("weight") else 0.0)).all() for name, p in norms.items())


def test_initial_weights_depend_on_the_generator_alone():
    first, second, third = build(1, layers=(1,)), build(1, layers=(1,)), build(2, layers=(1,))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.conv1.weight, third.conv1.weight)


@pytest.mark.slow
def test_initial_loss_is_that_of_guessing():
    torch.manual_seed(0)
    logits = build()(torch.randn(16, 3, 224, 224))
    loss = smoothed_cross_entropy(logits, torch.randint(1000, (16,)), 0.1, "mean")
    assert 6.8 < loss.item() < 7.5


def test_smoothed_loss_of_uniform_logits_is_the_log_of_the_classes():
    loss = smoothed_cross_entropy(torch.zeros(5, 1000), torch.arange(5), 0.1, "sum")
    assert loss.item() == pytest.approx(5 * math.log(1000))


def test_smoothed_loss_by_hand():
    # targets 0.95 and 0.05 at smoothing 0.1 over two classes; log-softmax of (1, 0) is (-0.3133, -1.3133)
    loss = smoothed_cross_entropy(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), 0.1)
    assert loss.item() == pytest.approx(0.95 * 0.313262 + 0.05 * 1.313262, abs=1e-5)


def test_half_precision_keeps_norms_in_fp32_and_weights_channels_last():
    model = build(width=16, classes=4).cast(torch.bfloat16)
    references = {"batch_norm": "reference", "convolution_moments": "reference"}
    assert model.choose_implementations(references) == references
    logits = model(torch.randn(2, 4, 32, 32, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    smoothed_cross_entropy(logits, torch.tensor([0, 3])).backward()
    for name, parameter in model.named_parameters():
        norm = "bn" in name or "downsample.1" in name
        assert parameter.dtype == parameter.grad.dtype == (torch.float32 if norm else torch.bfloat16), name
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name
    assert model.bn1.running_var.dtype == torch.float32
