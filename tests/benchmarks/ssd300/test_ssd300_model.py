"""The network: counts of the benchmark, the backbone against torchvision's, initial weights, and names for the log."""

from __future__ import annotations

import math
from pathlib import Path

import mlperf_logging.compliance_checker
import pytest
import torch
import yaml
from small_ssd300 import FACTS, SMALL

from benchmarks.ssd300.model import SSD300, Head, Joined
from benchmarks.ssd300.workload import initialised_tensors
from common.nn.fused_convolution import FusedConv2d

FOURTH_SLICE = 64 * 7 * 7
"""Weights of the first convolution that read the channel of zeros."""


@pytest.fixture(scope="module")
def network() -> SSD300:
    """The benchmark's."""
    return SSD300(FACTS, torch.Generator().manual_seed(0))


def test_parameters_are_counted_as_in_the_benchmark(network):
    parts = dict.fromkeys(("conv1", "layer1", "layer2", "layer3", "extras", "heads", "norms"), 0)
    for name, parameter in network.named_parameters():
        part = name.split(".")[1] if name.startswith("backbone") else name.split(".")[0]
        parts["norms" if name.startswith("backbone") and parameter.ndim == 1 else part] += parameter.numel()
    assert parts == {
        "conv1": 9_408 + FOURTH_SLICE,
        "layer1": 221_184,
        "layer2": 1_114_112,
        "layer3": 6_815_744,
        "extras": 3_574_400,
        "heads": 387_192 + 7_840_638,
        "norms": 128 + 768 + 2_304 + 6_656,
    }
    assert sum(parts.values()) - FOURTH_SLICE == 19_972_534


def test_flops_are_those_of_15_86_billion_multiply_adds(network):
    assert network.sample_flops(300) == pytest.approx(3 * 2 * 15.86e9, rel=0.005)


def test_a_picture_of_300_px_gives_8732_boxes(network):
    network.eval()
    with torch.no_grad():
        levels = network.levels(torch.randn(1, 3, 300, 300))
    assert [tuple(level.shape[1:]) for level in levels] == [
        (256, 38, 38),
        (512, 19, 19),
        (512, 10, 10),
        (256, 5, 5),
        (256, 3, 3),
        (256, 1, 1),
    ]


def test_weights_begin_glorot_uniform_with_classes_and_offsets_apart(network):
    fresh = SSD300(FACTS, torch.Generator().manual_seed(1))
    checked = 0
    for module in [*fresh.extras.modules(), *fresh.heads.modules()]:
        if not isinstance(module, FusedConv2d):
            continue
        kernel = module.kernel_size[0] ** 2
        parts = [module.weight]
        if isinstance(module, Head):
            parts = list(module.weight.split([module.channels.logits, module.channels.offsets]))
        for weight in parts:
            bound = math.sqrt(6 / (kernel * (weight.shape[0] + weight.shape[1])))
            assert 0.98 * bound < weight.abs().max().item() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
            checked += 1
        limit = 1 / math.sqrt(kernel * module.in_channels)
        assert 0.9 * limit < module.bias.abs().max().item() <= limit
    assert checked == 10 + 12


def test_the_heads_results_are_joined_with_their_gradients():
    network = SSD300(SMALL, torch.Generator().manual_seed(2)).double()
    channels = [head.channels for head in network.heads]
    results = [
        torch.randn(2, (c.logits + c.offsets + 7) // 8 * 8, side, side, dtype=torch.float64, requires_grad=True)
        for c, side in zip(channels, (3, 2, 1), strict=True)
    ]
    assert torch.autograd.gradcheck(lambda *given: Joined.apply(channels, *given), results)


def test_half_precision_leaves_the_norms_wide():
    network = SSD300(SMALL, torch.Generator().manual_seed(2)).cast(torch.bfloat16)
    outputs = network(torch.randn(2, 4, 64, 64).bfloat16())
    assert outputs.logits.dtype == outputs.offsets.dtype == torch.bfloat16
    assert {parameter.dtype for name, parameter in network.named_parameters() if ".bn" in name} == {torch.float32}
    (outputs.logits.float().sum() + outputs.offsets.float().sum()).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_the_log_gives_the_119_tensors_that_the_checker_lists():
    rules = Path(mlperf_logging.compliance_checker.__file__).parent / "training_1.1.0" / "closed_ssd.yaml"
    [end] = [entry["END"]["CHECK"] for entry in yaml.safe_load(rules.read_text()) if "END" in entry]
    names = initialised_tensors(FACTS.layers, 6)
    assert len(names) == len(set(names)) == 119
    initialized = {"initialized_tensors": names}
    assert eval(end, {"s": initialized, "sorted": sorted})
