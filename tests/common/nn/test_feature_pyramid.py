"""Feature pyramid: parity with torchvision's, its initial weights and its FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from common.nn.feature_pyramid import FeaturePyramid

CHANNELS = (8, 16, 24)


def build(extra: str) -> tuple[FeaturePyramid, FeaturePyramidNetwork]:
    """Ours and torchvision's with the same weights, fp64."""
    torch.manual_seed(0)
    above = {"convolutions": LastLevelP6P7(12, 12), "max_pool": LastLevelMaxPool(), "none": None}[extra]
    theirs = FeaturePyramidNetwork(list(CHANNELS), 12, extra_blocks=above).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = FeaturePyramid(CHANNELS, 12, extra).double().to(memory_format=torch.channels_last)
    ours.load_state_dict({name.replace(".0.", "."): value for name, value in theirs.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("extra", ["convolutions", "max_pool", "none"])
@pytest.mark.parametrize("sizes", [(16, 8, 4), (19, 10, 5)])
def test_levels_and_gradients_equal_torchvision(extra, sizes):
    ours, theirs = build(extra)
    stages = [torch.randn(2, c, size, size, dtype=torch.float64) for c, size in zip(CHANNELS, sizes, strict=True)]
    mine, others = ([value.clone().requires_grad_() for value in stages] for _ in range(2))
    found = ours(mine)
    expected = list(theirs(dict(zip("abc", others, strict=True))).values())
    assert len(found) == {"convolutions": 5, "max_pool": 4, "none": 3}[extra]
    for value, other in zip(found, expected, strict=True):
        assert torch.allclose(value, other, rtol=0, atol=1e-10)
    weights = [torch.randn_like(value) for value in expected]
    for outputs in (found, expected):
        sum((value * weight).sum() for value, weight in zip(outputs, weights, strict=True)).backward()
    for value, other in zip(mine, others, strict=True):
        assert torch.allclose(value.grad, other.grad, rtol=0, atol=1e-10)
    gradients = {name.replace(".0.", "."): parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-9), name


def test_drawn_weights_are_those_of_torchvision_in_distribution():
    ours = FeaturePyramid((64, 128), 64, "convolutions")
    ours.draw_weights(torch.Generator().manual_seed(0))
    for name, parameter in ours.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
            continue
        # uniform within the bound b has the standard deviation b / sqrt(3)
        bound = (3 / parameter[0].numel()) ** 0.5
        assert parameter.abs().max() <= bound, name
        assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=5 / parameter.numel() ** 0.5), name


@pytest.mark.parametrize("extra", ["convolutions", "max_pool", "none"])
def test_flops_are_those_that_pytorch_counts(extra):
    ours, theirs = build(extra)
    sizes = ((19, 33), (10, 17), (5, 9))
    layers, levels = ours.flops(sizes, [False, True, True])
    with torch.device("meta"):
        stages = [torch.empty(1, c, *size, dtype=torch.float64) for c, size in zip(CHANNELS, sizes, strict=True)]
    with FlopCounterMode(display=False) as counter:
        outputs = theirs.to("meta")(dict(zip("abc", stages, strict=True)))
    assert sum(layer.forward for layer in layers) == counter.get_total_flops()
    assert levels == [value.shape[2:] for value in outputs.values()]
    assert {layer.name: layer.training / layer.forward for layer in layers if "inner" in layer.name} == {
        "inner_blocks.0": 2,
        "inner_blocks.1": 3,
        "inner_blocks.2": 3,
    }
