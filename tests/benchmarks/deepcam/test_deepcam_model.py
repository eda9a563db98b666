"""The network of DeepCAM: its layers, its initial weights, and parity with a plain float64 definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.deepcam.config import Facts
from benchmarks.deepcam.model import DeepLab, forward_flops, normalised, weighted_cross_entropy
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts
from common.nn.batch_norm import BatchNorm2d

REAL = fixed_facts(Facts, "deepcam")
NARROW = {
    "image_size": [32, 64],
    "stem": [3, 4],
    "entry": [5, 6, 7],
    "middle_blocks": 2,
    "exit": [8, 5, 6, 9],
    "decoder": 4,
    "low_level": 3,
}
SMALL = fixed_facts(Facts, "deepcam", **NARROW)

PARTS = {
    "stem": (23_232, 10.2),
    "entry.0": (52_800, 14.5),
    "entry.1": (203_904, 14.0),
    "entry.2": (1_452_480, 25.1),
    "middle": (25_823_616, 178.0),
    "middle.7": (1_613_976, 178.0 / 16),
    "exit_block": (3_097_376, 21.4),
    "exit": (7_124_992, 49.2),
    "aspp.branches": (14_682_112, None),
    "aspp.pooled": (524_288, 0.0),
    "aspp.fuse": (328_192, 2.3),
    "decoder.low_level": (6_240, 0.7),
    "decoder.upsample": (1_180_672, 20.4),
    "decoder.merge": (1_357_056, 149.9),
    "decoder.full_size": (590_336, 65.2),
    "decoder.classes": (6_912, 3.1),
    "": (56_454_720, 655.3),
}
"""Parameters and forward GFLOPs of the parts of the MLPerf HPC network, counted by hand. The module list of the ASPP's
branches is not called, so it has no FLOPs of its own."""


def network(low_level_relu: bool = True, seed: int = 4) -> DeepLab:
    """Return a small float64 network whose batch norms and ASPP have other parameters than 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    made = DeepLab(SMALL, low_level_relu, generator).cast(torch.float64)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return made


def snapshots(count: int = 2) -> Tensor:
    x_NHWC = torch.randn(count, 32, 64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x_NHWC.movedim(-1, 1)


def test_parts_have_the_parameters_and_the_flops_of_the_benchmark():
    with torch.device("meta"):
        made = DeepLab(REAL)
    flops = forward_flops(REAL)
    for name, (parameters, giga) in PARTS.items():
        assert sum(p.numel() for p in made.get_submodule(name).parameters()) == parameters, name
        if giga is not None:
            assert flops[name] / 1e9 == pytest.approx(giga, abs=0.06), name
    assert made.aspp.scale.numel() + made.aspp.shift.numel() == 512
    norms = [layer for layer in made.modules() if isinstance(layer, BatchNorm2d)]
    assert (len(norms), sum(buffer.numel() for buffer in made.buffers())) == (76, 97_760)
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}


def test_features_and_logits_have_the_shapes_of_the_benchmark():
    shapes = {}
    with torch.device("meta"):
        made, x = DeepLab(REAL), torch.empty(1, 16, 768, 1152)
    for name in ("entry.0", "exit"):
        made.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, y, name=name: shapes.update({name: (y[0] if isinstance(y, tuple) else y).shape})
        )
    assert made(x).shape == (1, 3, 768, 1152)
    assert shapes == {"entry.0": (1, 128, 192, 288), "exit": (1, 2048, 48, 72)}


def plain(w: dict[str, Tensor], x: Tensor, aliased: bool, running: bool = False) -> Tensor:
    """Return logits of ``x`` with the weights ``w``: DeepLabv3+ of the HPC reference, written with functions only.

    Batch norms use the statistics of the batch, or the running ones.
    """

    def conv(name: str, x: Tensor, stride: int = 1, dilation: int = 1, padding: int | None = None) -> Tensor:
        weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
        padding = dilation * (weight.shape[-1] // 2) if padding is None else padding
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups=x.shape[1] // weight.shape[1])

    def norm(name: str, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        if running:
            mean, variance = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        y = (x.movedim(1, -1) - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
        return y.movedim(-1, 1)

    def separable(name: str, x: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
        return conv(f"{name}.1", conv(f"{name}.0", x, stride, dilation))

    def up(name: str, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w[f"{name}.weight"], stride=2, padding=1, output_padding=1)

    def layer(name: str, y: Tensor) -> Tensor:
        return norm(f"{name}.1", y).clamp(min=0)

    def projecting(name: str, x: Tensor, stride: int) -> Tensor:
        y = layer(f"{name}.main.0", separable(f"{name}.main.0.0", x))
        y = norm(f"{name}.main.2", separable(f"{name}.main.1", y))
        return separable(f"{name}.main.3", y, stride) + norm(f"{name}.skip_norm", conv(f"{name}.skip", x, stride))

    x = layer("stem.0", conv("stem.0.0", x, stride=2))
    x = layer("stem.1", conv("stem.1.0", x))
    low_level = x = projecting("entry.0", x, stride=2)
    x = F.relu(x, inplace=aliased)  # in place, it changes the low-level feature, too
    for number in (1, 2):
        x = projecting(f"entry.{number}", x, stride=2).clamp(min=0)
    for number in range(2):
        y, name = x, f"middle.{number}"
        for each in range(2):
            y = layer(f"{name}.main.{each}", separable(f"{name}.main.{each}.0", y))
        x = (norm(f"{name}.last_norm", separable(f"{name}.last", y)) + x).clamp(min=0)
    x = projecting("exit_block", x, stride=1)
    for number in range(3):
        x = layer(f"exit.{number}", separable(f"exit.{number}.0", x, dilation=2))
    branches = [
        layer(f"aspp.branches.{number}", conv(f"aspp.branches.{number}.0", x, dilation=dilation))
        for number, dilation in enumerate((1, 6, 12, 18))
    ]
    pooled = conv("aspp.pooled", x.mean((2, 3), keepdim=True))
    pooled = (pooled * w["aspp.scale"].view(1, -1, 1, 1) + w["aspp.shift"].view(1, -1, 1, 1)).clamp(min=0)
    x = torch.cat([*branches, pooled.repeat(1, 1, *x.shape[2:])], 1)
    x = layer("aspp.fuse", conv("aspp.fuse.0", x))
    for number in range(2):
        x = layer(f"decoder.upsample.{number}", up(f"decoder.upsample.{number}.0", x))
    x = torch.cat([x, layer("decoder.low_level", conv("decoder.low_level.0", low_level))], 1)
    for number in range(2):
        x = layer(f"decoder.merge.{number}", conv(f"decoder.merge.{number}.0", x))
    x = layer("decoder.full_size", up("decoder.full_size.0", conv("decoder.merge.2", x)))
    return up("decoder.classes", x)


@pytest.mark.parametrize("low_level_relu", [True, False])
def test_logits_and_gradients_are_those_of_the_plain_definition(low_level_relu):
    made, x = network(low_level_relu), snapshots()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in made.named_parameters()}
    found, expected = made(x), plain(weights, x, aliased=low_level_relu)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    d_logits = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found.backward(d_logits)
    expected.backward(d_logits)
    for name, parameter in made.named_parameters():
        gradient = weights[name].grad
        assert gradient is not None, name
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-7, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_evaluation_uses_the_running_statistics():
    made, x = network(), snapshots()
    made(x)  # the first update of the statistics
    found = made.eval()(x)
    torch.testing.assert_close(found, plain(made.state_dict(), x, aliased=True, running=True), rtol=1e-9, atol=1e-10)


def test_initial_weights_are_the_references_and_depend_only_on_the_generator():
    wide = {"stem": [64, 64], "entry": [64, 64, 64], "exit": [64, 64, 64, 64], "decoder": 64, "low_level": 64}
    architecture = fixed_facts(Facts, "deepcam", **NARROW | wide)
    made = DeepLab(architecture, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    again = DeepLab(architecture, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(one, two) for one, two in zip(made.parameters(), again.parameters(), strict=True))
    for name, layer in made.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            continue
        inputs = layer.weight.shape[1] * layer.kernel_size[0] * layer.kernel_size[1]
        uniform = name.startswith(("decoder.", "aspp.pooled", "aspp.fuse"))
        expected = (1 / (3 * inputs)) ** 0.5 if uniform else (2 / inputs) ** 0.5
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.12), name
        assert (layer.weight.abs().max().item() <= inputs**-0.5) == uniform, name
    assert 0 < made.get_submodule("decoder.merge.2").bias.abs().max() <= 64**-0.5  # type: ignore[operator, union-attr]


def test_the_input_and_the_parts_of_the_pyramid_are_channels_last():
    made = network()
    seen = []
    made.aspp.fuse.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    made.stem.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    x_NHWC, ones_C = torch.rand(2, 32, 64, 16), torch.ones(16)
    made(normalised(x_NHWC, ones_C, ones_C, torch.float64))
    assert [x.shape[1] for x in seen] == [16, 20]
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in seen)


def test_channels_are_shifted_and_scaled_before_they_are_rounded():
    """Surface pressure, about 1e5 Pa, would exceed the range of fp16."""
    x_NHWC = torch.stack([torch.full((1, 2, 3), 101_325.0), torch.full((1, 2, 3), 0.25)], -1)
    shift_C, scale_C = torch.tensor([50_000.0, -1.0]), torch.tensor([1 / 60_000, 0.5])
    found = normalised(x_NHWC, shift_C, scale_C, torch.float16)
    assert found.shape == (1, 2, 2, 3)
    assert found[0, :, 0, 0].tolist() == pytest.approx([51_325 / 60_000, 0.625], rel=1e-3)


def test_the_loss_is_the_plain_mean_of_weighted_cross_entropies():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    label = torch.randint(3, (2, 4, 5), generator=generator, dtype=torch.uint8)
    weight = torch.tensor(REAL.class_weights, dtype=torch.float64)
    total = 0.0
    for n, h, w in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(5)).tolist():
        scores, right = logits[n, :, h, w].tolist(), int(label[n, h, w])
        total += float(weight[right]) * (math.log(sum(map(math.exp, scores))) - scores[right])
    assert weighted_cross_entropy(logits, label, weight).item() == pytest.approx(total / 40, rel=1e-12)


def test_class_weights_and_the_first_loss_are_those_of_the_benchmark():
    assert REAL.class_weights == pytest.approx([1.0017, 2.6146, 1.7164], abs=1e-4)
    pixels = 2_000_000
    counts = [round(pixels * share) for share in REAL.class_frequencies]
    label = torch.cat([torch.full((1, 1, count), number) for number, count in enumerate(counts)], 2)
    logits = torch.zeros(1, 3, 1, sum(counts))
    assert weighted_cross_entropy(logits, label, torch.tensor(REAL.class_weights)).item() == pytest.approx(
        1.112, abs=1e-3
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": [768, 1150]}, "two multiples of 16"),
        ({"class_frequencies": [0.9, 0.1]}, "3 positive numbers"),
        ({"entry": [0, 6, 7]}, "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        fixed_facts(Facts, "deepcam", **changes)
