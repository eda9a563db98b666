"""The network of MiniGo against a plain definition in fp64, its parameters, its loss, and its form for inference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.minigo.features import PLANES, FeatureBits
from benchmarks.minigo.model import HeadNorm, InferenceNetwork, MiniGo, MiniGoArchitecture, decayed, losses
from common.distributed.layout import Layout
from common.nn.batch_norm import BatchNorm2d, averaged_statistics
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.train_step import apply_gradients
from tests.benchmarks.minigo.sizes import LARGE, SMALL, packed, random_planes, trained

NINE = MiniGoArchitecture(board=9, blocks=9, width=64, value_hidden=64)


def norm(x: Tensor, weights: dict[str, Tensor], name: str, training: bool) -> Tensor:
    if training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    else:
        mean, variance = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
    y = (x - mean.view(1, -1, 1, 1)) / (variance.view(1, -1, 1, 1) + 1e-5).sqrt()
    if f"{name}.weight" in weights:
        y = y * weights[f"{name}.weight"].view(1, -1, 1, 1) + weights[f"{name}.bias"].view(1, -1, 1, 1)
    return y


def convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Return a convolution with zeros around the board, as one product of patches and kernels."""
    edge = kernel.shape[-1]
    patches = F.unfold(x, edge, padding=edge // 2)
    return (kernel.flatten(1) @ patches).unflatten(2, x.shape[2:])


def plain(weights: dict[str, Tensor], planes: Tensor, blocks: int, training: bool) -> tuple[Tensor, Tensor]:
    """Return logits and values by the definition of the network, with the names of its parameters."""

    def layer(x: Tensor, conv: str, after: str) -> Tensor:
        return norm(convolution(x, weights[f"{conv}.weight"]), weights, after, training)

    x = layer(planes, "stem", "stem_norm").clamp(min=0)
    for number in range(blocks):
        name = f"blocks.{number}"
        y = layer(x, f"{name}.conv1", f"{name}.norm1").clamp(min=0)
        x = (layer(y, f"{name}.conv2", f"{name}.norm2") + x).clamp(min=0)
    policy = layer(x, "policy_conv", "policy_norm").clamp(min=0).flatten(1)
    value = layer(x, "value_conv", "value_norm").clamp(min=0).flatten(1)
    hidden = (value @ weights["value_hidden.weight"].T + weights["value_hidden.bias"]).clamp(min=0)
    logits = policy @ weights["policy.weight"].T + weights["policy.bias"]
    return logits, (hidden @ weights["value.weight"].T + weights["value.bias"])[:, 0].tanh()


@pytest.mark.parametrize(("architecture", "parameters"), [(LARGE, 736_671), (NINE, 692_343)])
def test_parameters_are_as_many_as_the_references(architecture, parameters):
    assert sum(parameter.numel() for parameter in MiniGo(architecture).parameters()) == parameters


@pytest.mark.parametrize(("architecture", "flops"), [(LARGE, 0.3255e9), (NINE, 0.109e9)])
def test_flops_are_the_published_ones(architecture, flops):
    assert architecture.forward_flops() == pytest.approx(flops, rel=3e-3)


def test_training_flops_are_the_published_ones():
    assert LARGE.training_flops() == pytest.approx(0.977e9 - 2 * 9 * 361 * 13 * 64, rel=1e-3)


@pytest.mark.parametrize("architecture", [SMALL, LARGE], ids=["5x5", "19x19"])
@pytest.mark.parametrize("training", [True, False])
def test_the_network_equals_its_definition_and_so_do_its_gradients(architecture, training):
    model = trained(architecture).train(training)
    bits = packed(random_planes(3, architecture.board))
    planes = FeatureBits(architecture.board, "cpu").planes(bits, torch.float64)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        weights[name].requires_grad_(parameter.requires_grad)
    logits, value = model(planes)
    expected = plain(weights, planes[:, :PLANES], architecture.blocks, training)
    torch.testing.assert_close((logits, value), expected, rtol=1e-10, atol=1e-10)
    (logits.square().sum() + value.sum()).backward()
    (expected[0].square().sum() + expected[1].sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-8, msg=name)


def test_running_statistics_move_by_a_twentieth_and_have_the_unbiased_variance():
    model = MiniGo(SMALL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    planes = FeatureBits(5, "cpu").planes(packed(random_planes(4, 5)), torch.float64)
    model(planes)
    x = convolution(planes[:, :PLANES], model.stem.weight.detach())
    torch.testing.assert_close(model.stem_norm.running_mean, 0.05 * x.mean((0, 2, 3)))
    torch.testing.assert_close(model.stem_norm.running_var, 0.95 + 0.05 * x.var((0, 2, 3), unbiased=True))
    assert not torch.equal(model.value_norm.running_var, torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize(("architecture", "uniform"), [(LARGE, 5.89), (NINE, 4.41)], ids=["19x19", "9x9"])
def test_initial_losses_are_close_to_those_of_a_uniform_policy_and_a_value_of_zero(architecture, uniform):
    model = MiniGo(architecture, generator=torch.Generator().manual_seed(0))
    planes = FeatureBits(architecture.board, "cpu").planes(packed(random_planes(32, architecture.board)), torch.float32)
    pi = F.one_hot(torch.arange(32), architecture.moves).float()
    outcome = 1.0 - 2 * (torch.arange(32) % 2)
    cross_entropy, squared = losses(*model(planes), pi, outcome)
    assert cross_entropy.item() == pytest.approx(uniform, abs=0.6)
    assert squared.item() == pytest.approx(1.0, abs=0.5)


def test_initial_kernels_fill_glorots_range():
    kernel = MiniGo(LARGE, generator=torch.Generator().manual_seed(0)).stem.weight
    bound = (6 / (9 * (13 + 64))) ** 0.5
    assert 0.98 * bound < kernel.abs().max().item() <= bound
    assert kernel.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_losses_by_hand():
    logits = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0]])
    pi = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    cross_entropy, squared = losses(logits, torch.tensor([0.5, -1.0]), pi, torch.tensor([1.0, 1.0]))
    assert cross_entropy.item() == pytest.approx((np.log(2) + np.log(4 / 3)) / 2)
    assert squared.item() == pytest.approx((0.25 + 4) / 2)


def test_an_update_has_the_gradient_of_the_penalty_in_the_loss():
    """The first step of SGD changes each weight by the rate times the gradient of loss and penalty."""
    bits, pi = packed(random_planes(3, 5)), torch.full((3, 26), 1 / 26, dtype=torch.float64)
    planes, outcome = FeatureBits(5, "cpu").planes(bits, torch.float64), torch.ones(3, dtype=torch.float64)
    expected = trained(SMALL)
    cross_entropy, squared = losses(*expected(planes), pi, outcome)
    kernels = [tensor for name, tensor in expected.named_parameters() if not name.endswith("bias")]
    (cross_entropy + 0.5 * squared + 0.01 * sum(0.5 * w.square().sum() for w in kernels)).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad

    model = trained(SMALL)
    named = dict(model.named_parameters())
    groups = [
        ParameterGroup({name: tensor for name, tensor in named.items() if decayed(name)}, weight_decay=0.01),
        ParameterGroup({name: tensor for name, tensor in named.items() if not decayed(name)}),
    ]
    optimizer = Optimizer(groups, SGD(0.9), lambda step: torch.tensor(0.1), Layout(), grad_divisor=1)
    optimizer.begin()
    cross_entropy, squared = losses(*model(planes), pi, outcome)
    optimizer.arm()
    (cross_entropy + 0.5 * squared).backward()
    assert not apply_gradients([optimizer], torch.zeros(()))
    for name, tensor in expected.named_parameters():
        torch.testing.assert_close(named[name].detach(), tensor.detach(), rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("architecture", [SMALL, LARGE], ids=["5x5", "19x19"])
def test_inference_equals_the_network_in_evaluation_mode(architecture):
    model = trained(architecture).eval()
    folded = InferenceNetwork(architecture, dtype=torch.float64)
    folded.load(model.state_dict())
    bits = packed(random_planes(4, architecture.board))
    logits, value = model(FeatureBits(architecture.board, "cpu").planes(bits, torch.float64))
    found = folded(bits)
    torch.testing.assert_close(found, (logits.softmax(1), value), rtol=1e-9, atol=1e-12)


def test_inference_in_half_precision_stays_close():
    model = trained(LARGE, torch.float32).eval()
    folded = InferenceNetwork(LARGE, dtype=torch.bfloat16)
    folded.load(model.state_dict())
    bits = packed(random_planes(4, 19))
    logits, value = model(FeatureBits(19, "cpu").planes(bits, torch.float32))
    probability, found = folded(bits)
    assert probability.dtype == found.dtype == torch.float32
    assert (probability - logits.softmax(1)).abs().sum(1).max() < 0.15
    assert (found - value).abs().max() < 0.1


def test_inference_keeps_its_memory_when_another_model_is_loaded():
    folded = InferenceNetwork(SMALL)
    before = {name: tensor.data_ptr() for name, tensor in folded.named_parameters()}
    first = [tensor.clone() for tensor in folded.parameters()]
    folded.load(trained(SMALL, torch.float32).state_dict())
    assert {name: tensor.data_ptr() for name, tensor in folded.named_parameters()} == before
    assert all(not torch.equal(old, new) for old, new in zip(first, folded.parameters(), strict=True))


def test_statistics_of_all_norms_can_be_averaged():
    model = MiniGo(SMALL)
    found = averaged_statistics(model, Layout(), (BatchNorm2d, HeadNorm))
    assert found.keys() == dict(model.named_buffers()).keys()


def test_the_network_learns_512_random_positions_by_heart():
    model = MiniGo(SMALL, generator=torch.Generator().manual_seed(0))
    features, generator = FeatureBits(5, "cpu"), torch.Generator().manual_seed(1)
    planes = features.planes(packed(random_planes(512, 5)), torch.float32)
    pi = F.one_hot(torch.randint(SMALL.moves, (512,), generator=generator), SMALL.moves).float()
    outcome = 2.0 * torch.randint(2, (512,), generator=generator) - 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(40):
        for part in torch.arange(512).split(128):
            cross_entropy, squared = losses(*model(planes[part]), pi[part], outcome[part])
            optimizer.zero_grad()
            (cross_entropy + 0.5 * squared).backward()
            optimizer.step()
    cross_entropy, squared = losses(*model.eval()(planes), pi, outcome)
    assert cross_entropy.item() < 0.5
    assert squared.item() < 0.1
