"""ResNet trunk: parity with torchvision's networks, what frozen batch norm folds and keeps, shapes, FLOPs, files.

That of ResNet-50 is compared where the classifier is (``tests/benchmarks/resnet``).
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from common.errors import CheckpointError, ConfigError
from common.nn.backbone_file import load_backbone
from common.nn.batch_norm import FrozenBatchNorm2d
from common.nn.convolution import cast_weights
from common.nn.frozen import frozen_names
from common.nn.fused_convolution import FusedConv2d
from common.nn.resnet import FrozenNorm, ResNetShape, ResNetTrunk, TrainedNorm, draw_weights

TRAINED = TrainedNorm(1e-5, 0.1)


def resnet34() -> tuple[ResNetShape, ResNet]:
    """SSD300's trunk: three stages, the third without a stride."""
    theirs = torchvision.models.resnet34()
    first = theirs.layer3[0]
    first.conv1.stride = first.downsample[0].stride = (1, 1)
    return ResNetShape((3, 4, 6), 64, bottleneck=False, norm=TRAINED, strides=(1, 2, 1)), theirs


def resnet50() -> tuple[ResNetShape, ResNet]:
    return ResNetShape((3, 4, 6, 3), 64, bottleneck=True, norm=TRAINED), torchvision.models.resnet50()


def small_resnext() -> tuple[ResNetShape, ResNet]:
    shape = ResNetShape((1, 2, 1, 1), 64, bottleneck=True, norm=TRAINED, groups=8, width_per_group=2)
    return shape, ResNet(Bottleneck, [1, 2, 1, 1], groups=8, width_per_group=2)


def resnet_of_the_paper() -> tuple[ResNetShape, ResNet]:
    """Strides in the first 1x1 convolutions of bottlenecks."""
    theirs = ResNet(Bottleneck, [1, 2, 1, 1])
    for stage in (theirs.layer2, theirs.layer3, theirs.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return ResNetShape((1, 2, 1, 1), 64, bottleneck=True, norm=TRAINED, stride_in_1x1=True), theirs


def frozen_resnext(eps: float = 1e-5, trained_stages: int = 3) -> tuple[ResNetTrunk, ResNet]:
    """A small trunk with frozen norms, and torchvision's with the same weights, both fp64."""

    def norm(channels: int) -> nn.Module:
        return torchvision.ops.FrozenBatchNorm2d(channels, eps)

    torch.manual_seed(0)
    theirs = ResNet(Bottleneck, [1, 2, 1, 1], groups=8, width_per_group=2, norm_layer=norm).double()
    scatter_norms(theirs)
    shape = ResNetShape((1, 2, 1, 1), 64, True, FrozenNorm(eps, trained_stages), groups=8, width_per_group=2)
    ours = ResNetTrunk(shape).double()
    ours.load_state_dict(without_classifier(theirs))
    return ours, theirs


@torch.no_grad()
def scatter_norms(model: nn.Module) -> None:
    """Give frozen batch norms values of a trained network's kind."""
    for module in model.modules():
        if isinstance(module, torchvision.ops.FrozenBatchNorm2d):
            for name, low, high in (("weight", 0.5, 1.5), ("bias", -0.5, 0.5), ("running_mean", -0.5, 0.5)):
                getattr(module, name).uniform_(low, high)
            module.running_var.uniform_(0.5, 2.0)


def without_classifier(theirs: ResNet, stages: int = 4) -> dict[str, Tensor]:
    unwanted = ("fc.", *(f"layer{number}." for number in range(stages + 1, 5)))
    return {name: value for name, value in theirs.state_dict().items() if not name.startswith(unwanted)}


def their_stages(theirs: ResNet, image: Tensor, stages: int) -> list[Tensor]:
    x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(image))))
    outputs = []
    for number in range(1, stages + 1):
        x = theirs.get_submodule(f"layer{number}")(x)
        outputs.append(x)
    return outputs


def weighted_sum(outputs: list[Tensor]) -> Tensor:
    """A scalar that every output of every stage has a weight of its own in."""
    generator = torch.Generator().manual_seed(1)
    return sum(
        (value * torch.randn(value.shape, generator=generator, dtype=value.dtype)).sum() / value.numel() ** 0.5
        for value in outputs
    )


def assert_close(found: Tensor, expected: Tensor, name: str, tolerance: float = 1e-10) -> None:
    assert (found - expected).abs().max() <= tolerance * max(1e-3, expected.abs().max().item()), name


@pytest.mark.parametrize("build", [resnet34, small_resnext, resnet_of_the_paper])
def test_stages_gradients_and_statistics_equal_torchvision(build):
    torch.manual_seed(0)
    shape, theirs = build()
    theirs.double().train()
    stages = len(shape.layers)
    ours = ResNetTrunk(shape).double().to(memory_format=torch.channels_last)
    ours.load_state_dict(without_classifier(theirs, stages))
    image = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    found, expected = ours.features(image), their_stages(theirs, image, stages)
    for number, (value, other) in enumerate(zip(found, expected, strict=True), 1):
        assert_close(value, other, f"layer{number}")
    weighted_sum(found).backward()
    weighted_sum(expected).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[name], name, 1e-8)
    for name, value in ours.named_buffers():
        assert_close(value, theirs.state_dict()[name], name)
    # and with the running statistics
    with torch.no_grad():
        found = ours.eval().features(image, [stages])
        assert_close(found[0], their_stages(theirs.eval(), image, stages)[-1], "evaluation")


@pytest.mark.parametrize("trained_stages", [0, 1, 3, 5])
def test_frozen_norms_give_the_stages_and_gradients_of_torchvision(trained_stages):
    ours, theirs = frozen_resnext(trained_stages=trained_stages)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    image = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    found, expected = ours.features(image), their_stages(theirs, image, 4)
    for number, (value, other) in enumerate(zip(found, expected, strict=True), 1):
        assert_close(value, other, f"layer{number}")
    parts = ["conv1", "layer1", "layer2", "layer3", "layer4"]
    trained = parts[len(parts) - trained_stages :]
    if trained:
        weighted_sum(found).backward()
    weighted_sum(expected).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if name.split(".")[0] in trained:
            assert_close(parameter.grad, gradients[name], name, 1e-8)
        else:
            assert not parameter.requires_grad, name
            assert parameter.grad is None, name
            assert name in frozen_names(ours)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert {name for name, _ in ours.named_buffers()} <= frozen_names(ours)


def test_nothing_of_frozen_stages_is_saved_for_the_backward_pass():
    ours, _ = frozen_resnext(trained_stages=3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: saved.append(value.shape) or value, lambda value: value
    ):
        outputs = ours.features(torch.randn(1, 3, 64, 64, dtype=torch.float64), [1, 2])
    assert not outputs[0].requires_grad
    assert outputs[1].requires_grad
    # of the 16x16 maps only the input of layer2, and what its first convolution makes of that
    assert not [shape for shape in saved if len(shape) == 4 and shape[2] > 16]
    assert {shape[1] for shape in saved if len(shape) == 4 and shape[2] == 16} <= {256, 32}


def test_only_the_stages_asked_for_are_run_and_given():
    ours, theirs = frozen_resnext()
    ours.get_submodule("layer4").register_forward_hook(lambda *_: pytest.fail("layer4 was run"))
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    found = ours.features(image, [1, 3])
    expected = their_stages(theirs, image, 3)
    assert len(found) == 2
    assert_close(found[0], expected[0], "layer1")
    assert_close(found[1], expected[2], "layer3")


@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_frozen_batch_norm_is_that_of_torchvision(eps):
    torch.manual_seed(0)
    theirs = torchvision.ops.FrozenBatchNorm2d(7, eps).double()
    scatter_norms(theirs)
    ours = FrozenBatchNorm2d(7, eps).double()
    ours.load_state_dict({**theirs.state_dict(), "num_batches_tracked": torch.tensor(3)})
    x = torch.randn(2, 7, 5, 5, dtype=torch.float64)
    assert_close(ours(x), theirs(x), "output", 1e-14)
    scale, shift = ours.scale_and_shift()
    assert_close(scale, theirs.weight / (theirs.running_var + eps).sqrt(), "scale", 1e-14)
    assert_close(shift, theirs.bias - theirs.running_mean * scale, "shift", 1e-14)
    assert not list(ours.parameters())
    assert frozen_names(ours) == {"weight", "bias", "running_mean", "running_var"}


def test_frozen_norms_stay_fp32_and_scaled_weights_are_rounded_once():
    ours, _ = frozen_resnext()
    ours.float()
    cast_weights(ours, torch.bfloat16)
    given = []
    block = ours.get_submodule("layer2.0")
    for name in ("layer1.0", "layer2.0"):
        layer = ours.get_submodule(f"{name}.conv2")
        assert isinstance(layer, FusedConv2d)
        run = layer.run
        layer.run = lambda x, weight, bias, *rest, run=run: given.append((weight, bias)) or run(x, weight, bias, *rest)
    outputs = ours.features(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16))
    assert {value.dtype for value in outputs} == {torch.bfloat16}
    for name, (weight, bias) in zip(("layer1.0", "layer2.0"), given, strict=True):
        norm, layer = ours.get_submodule(f"{name}.bn2"), ours.get_submodule(f"{name}.conv2")
        assert {value.dtype for value in norm.buffers()} == {torch.float32}
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        assert torch.equal(weight, (layer.weight.float() * scale.view(-1, 1, 1, 1)).bfloat16()), name
        assert torch.equal(bias, (norm.bias - norm.running_mean * scale).bfloat16()), name
    weighted_sum(outputs).backward()
    assert block.conv2.weight.grad.dtype == torch.bfloat16


def kept(trunk: ResNetTrunk) -> list[Tensor]:
    """What the convolutions keep of frozen tensors."""
    return [value for convolution in trunk.folded() for value in convolution._kept]


def test_folded_tensors_are_made_once(monkeypatch):
    ours, _ = frozen_resnext()
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    first = ours.features(image)
    monkeypatch.setattr(FrozenBatchNorm2d, "scale_and_shift", lambda norm: pytest.fail("folded again"))
    assert all(torch.equal(a, b) for a, b in zip(ours.features(image), first, strict=True))
    with torch.no_grad():
        ours.eval().features(image)


def test_folded_tensors_stay_in_their_memory_when_a_state_is_loaded():
    ours, _ = frozen_resnext()
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    ours.features(image)
    first = kept(ours)
    torch.manual_seed(7)
    other = {name: torch.rand_like(value) + 0.5 for name, value in ours.state_dict().items()}
    before = [value.clone() for value in first]
    ours.load_state_dict(other)
    # without a forward pass in between: a graph that was captured reads this memory when it is replayed
    assert all(a is b for a, b in zip(kept(ours), first, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    fresh = ResNetTrunk(ours.shape).double()
    fresh.load_state_dict(other)
    assert all(torch.equal(a, b) for a, b in zip(ours.features(image), fresh.features(image), strict=True))


def change_in_place(trunk: ResNetTrunk) -> None:
    with torch.no_grad():
        trunk.get_submodule("layer1.0.conv1").weight.mul_(2)
        trunk.get_submodule("layer3.0.bn1").running_var.mul_(3)


def change_dtype(trunk: ResNetTrunk) -> None:
    cast_weights(trunk, torch.bfloat16)
    trunk.double()


def thaw(trunk: ResNetTrunk) -> None:
    trunk.get_submodule("layer1").requires_grad_(True)
    change_in_place(trunk)


@pytest.mark.parametrize("change", [change_in_place, change_dtype, thaw])
def test_folded_tensors_follow_the_frozen_ones(change):
    ours, _ = frozen_resnext()
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = ours.features(image)
    change(ours)
    fresh = copy.deepcopy(ours)
    for convolution in fresh.folded():
        convolution._kept = None
    found, expected = ours.features(image), fresh.features(image)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[-1], before[-1])


def test_a_copy_folds_its_own_tensors():
    ours, _ = frozen_resnext()
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    expected = ours.features(image)
    copied = copy.deepcopy(ours)
    change_in_place(ours)
    assert all(torch.equal(a, b) for a, b in zip(copied.features(image), expected, strict=True))


def test_impossible_shapes_are_refused():
    with pytest.raises(ConfigError, match="groups=32"):
        ResNetShape((2, 2), 64, bottleneck=False, norm=TRAINED, groups=32, width_per_group=4)
    with pytest.raises(ConfigError, match="stride_in_1x1=true"):
        ResNetShape((2, 2), 64, bottleneck=False, norm=TRAINED, stride_in_1x1=True)
    with pytest.raises(ConfigError, match="one block in each"):
        ResNetShape((1, 0), 64, bottleneck=True, norm=TRAINED)
    with pytest.raises(ConfigError, match="5 stages"):
        ResNetShape((1,) * 5, 64, bottleneck=True, norm=TRAINED)
    with pytest.raises(ConfigError, match="trained_stages=6: 0 to 5"):
        ResNetShape((1,) * 4, 64, bottleneck=True, norm=FrozenNorm(1e-5, 6))


def test_drawn_weights_are_he_normal_over_fan_out_and_depend_on_the_generator_alone():
    shape = ResNetShape((1, 1), 64, bottleneck=True, norm=TRAINED, input_channels=4)
    first, second = ResNetTrunk(shape), ResNetTrunk(shape)
    for trunk in (first, second):
        draw_weights(trunk, torch.Generator().manual_seed(5))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        if parameter.dim() == 4:
            drawn = parameter[:, :3] if name == "conv1.weight" else parameter
            expected = (2 / (drawn.shape[0] * drawn[0, 0].numel())) ** 0.5
            assert drawn.std().item() == pytest.approx(expected, rel=5 / drawn.numel() ** 0.5), name
    assert not first.conv1.weight[:, 3].any()


def test_a_drawn_trunk_with_frozen_norms_keeps_the_spread_of_its_pictures():
    trunk = ResNetTrunk(ResNetShape((3, 4, 6, 3), 16, bottleneck=True, norm=FrozenNorm(1e-5, 5)))
    draw_weights(trunk, torch.Generator().manual_seed(5))
    image = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        spreads = [float(stage.std()) for stage in trunk.features(image)]
    assert max(spreads) < 4 * min(spreads)  # doubling in every block makes it 30 times


@pytest.mark.parametrize("build", [resnet34, resnet50, small_resnext, resnet_of_the_paper])
def test_flops_are_those_that_pytorch_counts(build):
    shape, theirs = build()
    layers, sizes = ResNetTrunk(shape).flops((75, 107))
    with torch.device("meta"):
        image = torch.empty(1, 3, 75, 107)
    with FlopCounterMode(display=False) as counter:
        outputs = their_stages(theirs.to("meta"), image, len(shape.layers))
    assert sum(layer.forward for layer in layers) == counter.get_total_flops()
    assert sizes == [value.shape[2:] for value in outputs]
    assert len(layers) == len(list(filter(lambda layer: layer.dim() == 4, ResNetTrunk(shape).parameters())))


def test_training_flops_leave_out_gradients_that_frozen_stages_do_not_need():
    shape = ResNetShape((1, 1), 64, bottleneck=True, norm=FrozenNorm(1e-5, 1))
    times = {layer.name: layer.training / layer.forward for layer in ResNetTrunk(shape).flops((64, 64))[0]}
    assert times.pop("conv1") == 1
    assert {times[name] for name in times if name.startswith("layer1")} == {1}
    # these two see the output of a frozen stage
    assert times.pop("layer2.0.conv1") == times.pop("layer2.0.downsample.0") == 2
    assert {times[name] for name in times if name.startswith("layer2")} == {3}


def save(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize("input_channels", [3, 4])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_torchvision_file_is_loaded_without_the_classifier_and_further_stages(tmp_path, input_channels, legacy):
    theirs = ResNet(BasicBlock, [1, 1, 1, 1])
    path = tmp_path / "backbone.pth"
    torch.save(theirs.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    shape = ResNetShape((1, 1, 1), 64, False, TRAINED, strides=(1, 2, 1), input_channels=input_channels)
    trunk = ResNetTrunk(shape)
    load_backbone(path, trunk)
    for name, value in trunk.state_dict().items():
        expected = theirs.state_dict()[name]
        if name == "conv1.weight":
            assert not value[:, 3:].any()
            value = value[:, :3]
        assert torch.equal(value, expected), name


def bad_states() -> dict[str, tuple[object, str]]:
    good = without_classifier(ResNet(BasicBlock, [1, 1, 1, 1]), 2)
    name = "layer1.0.conv2.weight"
    return {
        "a tensor less": ({key: value for key, value in good.items() if key != name}, f"{name} is missing"),
        "more blocks": ({**good, "layer2.1.conv1.weight": torch.ones(1)}, r"no tensor layer2\.1\.conv1\.weight"),
        "another width": ({**good, name: torch.ones(64, 32, 3, 3)}, rf"{name} is \(64, 32, 3, 3\)"),
        "not finite": ({**good, name: good[name] * float("nan")}, f"{name} has 36864 of 36864 values"),
        "integers": ({**good, name: good[name].long()}, rf"{name} is torch\.int64"),
        "no tensor": ({**good, name: "weights"}, f"a str under '{name}'"),
        "a list": ([good[name]], "a list"),
        "bottleneck blocks": (without_classifier(ResNet(Bottleneck, [1, 1, 1, 1]), 2), "conv1.weight is"),
    }


@pytest.mark.parametrize("case", bad_states())
def test_a_file_of_another_network_is_one_error_that_names_the_tensor(tmp_path, case):
    state, message = bad_states()[case]
    trunk = ResNetTrunk(ResNetShape((1, 1), 64, bottleneck=False, norm=TRAINED))
    before = copy.deepcopy(trunk.state_dict())
    with pytest.raises(CheckpointError, match=message) as raised:
        load_backbone(save(tmp_path / "backbone.pth", state), trunk)
    assert "backbone.pth" in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in trunk.state_dict().items())


def test_a_missing_file_is_one_error(tmp_path):
    trunk = ResNetTrunk(ResNetShape((1,), 64, bottleneck=False, norm=TRAINED))
    with pytest.raises(CheckpointError, match="no such backbone file"):
        load_backbone(tmp_path / "backbone.pth", trunk)
    with pytest.raises(CheckpointError, match="not a file"):
        load_backbone(tmp_path, trunk)


@pytest.mark.parametrize("right", [True, False], ids=["the file's own", "another's"])
def test_a_digest_in_the_name_of_a_backbone_is_checked(right, tmp_path):
    trunk = ResNetTrunk(ResNetShape((1,), 8, bottleneck=False, norm=TRAINED))
    state = {name: torch.full_like(tensor, 0.5) for name, tensor in trunk.state_dict().items()}
    path = save(tmp_path / "resnet.pth", state)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8] if right else "0badcafe"
    path = path.rename(tmp_path / f"resnet-{digest}.pth")
    if right:
        load_backbone(path, trunk)
        assert (trunk.conv1.weight == 0.5).all()
    else:
        with pytest.raises(CheckpointError, match="by its name begins with 0badcafe"):
            load_backbone(path, trunk)
