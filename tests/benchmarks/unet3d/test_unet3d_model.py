"""The network against the definition of the benchmark, and against MONAI's DynUNet with the same options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from benchmarks.unet3d.config import Facts
from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture
from common.distributed.spatial.split import VolumeSplit
from common.errors import ConfigError, UnsupportedImplementation
from common.mlperf.fixed import fixed_facts

FULL = (128, 128, 128)
PARAMETERS = {
    "input_block": 28_640,
    "down0": 166_144,
    "down1": 664_064,
    "down2": 2_655_232,
    "down3": 4_977_920,
    "bottleneck": 5_530_880,
    "up0": 9_115_200,
    "up1": 5_965_056,
    "up2": 1_589_888,
    "up3": 397_632,
    "up4": 99_488,
    "output": 99,
}
GFLOPS = {
    "input_block": 119.59,
    "down0": 86.97,
    "down1": 43.49,
    "down2": 21.74,
    "down3": 5.10,
    "bottleneck": 0.71,
    "up0": 8.60,
    "up1": 44.16,
    "up2": 89.12,
    "up3": 178.24,
    "up4": 356.48,
    "output": 0.40,
}
"""Of the forward pass of one sample of 128³: 2 per multiply-add."""

SHAPES = {
    "input_block": (32, 128),
    "down0": (64, 64),
    "down1": (128, 32),
    "down2": (256, 16),
    "down3": (320, 8),
    "bottleneck": (320, 4),
    "up0": (320, 8),
    "up1": (256, 16),
    "up2": (128, 32),
    "up3": (64, 64),
    "up4": (32, 128),
    "output": (3, 128),
}
"""Channels and edge of every block's result, for a sample of 128³."""

RULES = fixed_facts(Facts, "unet3d")
SMALL = replace(RULES, filters=(3, 4, 5, 6, 7))


@pytest.fixture(scope="module")
def full() -> UNet3D:
    """The benchmark's network without memory."""
    return UNet3D(RULES, device="meta")


def monai(architecture: UNet3DArchitecture) -> nn.Module:
    return DynUNet(
        spatial_dims=3, in_channels=1, out_channels=architecture.classes,
        kernel_size=[3] * 6, strides=[1, 2, 2, 2, 2, 2], upsample_kernel_size=[2] * 5,
        filters=[*architecture.filters, architecture.filters[-1]], norm_name=("instance", {"affine": True}),
        act_name="relu", trans_bias=True,
    )  # fmt: skip


def monai_name(name: str) -> str:
    """MONAI's name of one of our parameters."""
    block, *path, kind = name.split(".")
    if block == "output":
        return f"output_block.conv.conv.{kind}"
    if path == ["upsample"]:
        return f"upsamples.{block.removeprefix('up')}.transp_conv.conv.{kind}"
    convolution, layer = path
    layer = f"{convolution}.conv" if layer == "conv" else f"norm{convolution.removeprefix('conv')}"
    if block.startswith("up"):
        return f"upsamples.{block.removeprefix('up')}.conv_block.{layer}.{kind}"
    block = f"downsamples.{block.removeprefix('down')}" if block.startswith("down") else block
    return f"{block}.{layer}.{kind}"


def test_there_are_78_tensors_and_31_190_243_parameters(full):
    parameters = list(full.parameters())
    assert len(parameters) == 78
    assert sum(parameter.numel() for parameter in parameters) == 31_190_243


def test_every_block_has_its_parameters(full):
    assert {name: sum(p.numel() for p in block.parameters()) for name, block in full.blocks} == PARAMETERS


def test_every_block_has_its_flops(full):
    found = {name: flops / 1e9 for name, flops in full.architecture.forward_flops(FULL).items()}
    assert found == pytest.approx(GFLOPS, abs=0.005)
    assert sum(found.values()) == pytest.approx(954.6, abs=0.05)
    assert full.architecture.training_flops(FULL) / 1e12 == pytest.approx(2.860, abs=0.0005)


def test_every_block_returns_its_shape(full):
    found = {}

    def note(name: str, y: Tensor | tuple[Tensor, Tensor]) -> None:
        shapes = {tuple(part.shape) for part in (y if isinstance(y, tuple) else (y,))}
        (found[name],) = shapes  # the two results of a block on the way down are alike

    hooks = [
        block.register_forward_hook(lambda _module, _inputs, y, name=name: note(name, y)) for name, block in full.blocks
    ]
    full(torch.empty(1, 1, *FULL, device="meta"))
    for hook in hooks:
        hook.remove()
    assert list(found.items()) == [(name, (1, channels, *[edge] * 3)) for name, (channels, edge) in SHAPES.items()]


def test_logits_and_gradients_equal_monais():
    model = UNet3D(SMALL, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference = monai(SMALL).double()
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert {monai_name(name) for name in ours} == theirs.keys()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in ours.items():
            if ".norm." in name:  # all are 1 and 0 at first
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            theirs[monai_name(name)].copy_(parameter)
    image = torch.randn(2, 1, 64, 32, 32, dtype=torch.float64, generator=generator)
    gradient = torch.randn(2, 3, 64, 32, 32, dtype=torch.float64, generator=generator)
    logits, expected = model(image), reference(image)
    logits.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    for name, parameter in ours.items():
        wanted = theirs[monai_name(name)].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()), msg=name)


def bound(name: str, parameter: Tensor) -> float:
    """b of U(-b, b): one over the root of kernel voxels times input channels, of a transposed one output channels."""
    block = name.split(".")[0]
    if block == "output":
        return 1 / math.sqrt(32)
    if "upsample" in name:
        return 1 / math.sqrt(8 * SHAPES[block][0])
    return 1 / math.sqrt(27 * parameter.shape[1])


def test_initial_weights_are_uniform_in_their_bounds():
    model = UNet3D(RULES, generator=torch.Generator().manual_seed(1))
    for name, parameter in model.named_parameters():
        if ".norm." in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
            continue
        limit = bound(name, parameter)
        largest = float(parameter.detach().abs().max())
        assert largest <= limit * (1 + 1e-6), name
        if parameter.numel() > 100:
            assert largest > 0.95 * limit, name
        if parameter.numel() > 5000:
            assert float(parameter.detach().std()) == pytest.approx(limit / math.sqrt(3), rel=0.03), name


def test_initial_weights_depend_only_on_the_generator():
    first, again, other = (
        UNet3D(SMALL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 1, 2)
    )
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert ".norm." in name or not torch.equal(parameter, other.get_parameter(name)), name


def test_initial_weights_in_half_precision_are_rounded_from_fp32():
    wide, narrow = (
        UNet3D(SMALL, generator=torch.Generator().manual_seed(1), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for name, parameter in wide.named_parameters():
        assert torch.equal(narrow.get_parameter(name), parameter.bfloat16()), name


def test_the_image_gets_no_gradient_and_the_first_weight_does():
    model = UNet3D(SMALL, generator=torch.Generator().manual_seed(1))
    image = torch.randn(1, 1, 64, 32, 32)
    model(image).sum().backward()
    assert image.grad is None
    assert float(model.input_block.conv1.conv.weight.grad.abs().sum()) > 0


def test_a_whole_volume_has_no_redundant_parameters(full):
    assert full.redundant_parameters() == frozenset()
    assert full.chosen()["halo"] == "none"


def test_a_split_over_one_rank_is_none():
    model = UNet3D(SMALL, generator=torch.Generator().manual_seed(1), split=VolumeSplit(1, 0))
    assert model.chosen()["halo"] == "none"
    assert model(torch.randn(1, 1, 64, 32, 32)).shape == (1, 3, 64, 32, 32)


@pytest.mark.parametrize(
    ("size", "ranks", "message"),
    [
        ((128, 100, 128), 1, "100 voxels along H: must be a multiple of 32"),
        ((128, 128, 0), 1, "0 voxels along W"),
        ((32, 32, 32), 1, "end in a single voxel"),
        ((32, 128, 128), 8, "use a multiple of 64 planes, or fewer ranks"),
        ((128, 128, 128), 3, "use a multiple of 96 planes"),
    ],
    ids=["odd", "empty", "single voxel", "thin slabs", "three ranks"],
)
def test_the_error_for_a_wrong_size_gives_a_possible_one(size, ranks, message):
    with pytest.raises(ConfigError, match=message):
        SMALL.check_size(size, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_benchmarks_volumes_fit_every_group(ranks):
    SMALL.check_size(FULL, ranks)


def test_the_model_rejects_a_wrong_size():
    with pytest.raises(ConfigError, match="40 voxels along D"):
        UNet3D(SMALL)(torch.zeros(1, 1, 40, 64, 64))


@pytest.mark.parametrize("option", ["instance_norm", "upsample", "convolution", "output_convolution"])
def test_the_error_for_an_unknown_implementation_names_it(option):
    with pytest.raises(UnsupportedImplementation, match=rf"model\.implementations\.{option}=magic"):
        UNet3D(SMALL, implementations={option: "magic"})


def test_five_numbers_of_filters_are_needed():
    with pytest.raises(ConfigError, match=r"^benchmark\.facts\.filters=\(1, 2\): 5 positive numbers$"):
        fixed_facts(Facts, "unet3d", filters=[1, 2])
