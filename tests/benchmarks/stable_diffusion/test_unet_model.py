"""Test the U-Net's parameters, initial weights, outputs and gradients against its definition and diffusers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.peer import build, step_of
from benchmarks.stable_diffusion.residual import maps_of, rows_of
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture, multiply_adds, training_flops
from common.errors import ConfigError, UnsupportedImplementation
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.stable_diffusion.public_names import diffusers_name, to_published
from tests.benchmarks.stable_diffusion.small_unet import SMALL, inputs, small_unet, velocity

PARAMETERS = {
    "time_embed": 2_050_560,
    "input_blocks.0": 11_840,
    **{f"input_blocks.{number}": 4_965_120 for number in (1, 2)},
    "input_blocks.3": 921_920,
    "input_blocks.4": 16_074_240,
    "input_blocks.5": 17_712_640,
    "input_blocks.6": 3_687_040,
    "input_blocks.7": 60_001_280,
    "input_blocks.8": 66_554_880,
    "input_blocks.9": 14_746_880,
    **{f"input_blocks.{number}": 31_138_560 for number in (10, 11)},
    "middle_block": 97_693_440,
    **{f"output_blocks.{number}": 49_164_800 for number in (0, 1)},
    "output_blocks.2": 63_911_680,
    **{f"output_blocks.{number}": 84_581_120 for number in (3, 4)},
    "output_blocks.5": 91_134_720,
    "output_blocks.6": 26_317_440,
    "output_blocks.7": 22_220_160,
    "output_blocks.8": 23_858_560,
    "output_blocks.9": 7_117_120,
    **{f"output_blocks.{number}": 6_092_480 for number in (10, 11)},
    "out": 12_164,
}
"""Parameters of every block of the reference's network."""


def published_size() -> UNet:
    """Return the network of the rules on the meta device."""
    return UNet(fixed_facts(Facts, "stable_diffusion"), device="meta", dtype=torch.float16)


def block_of(name: str) -> str:
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first.endswith("put_blocks") else first


def test_every_block_has_the_references_number_of_parameters():
    model, counts = published_size(), Counter[str]()
    for name, parameter in to_published(dict(model.named_parameters()), model.architecture).items():
        counts[block_of(name)] += parameter.numel()
    assert counts == PARAMETERS
    assert sum(parameter.numel() for parameter in model.parameters()) == 865_910_724


def test_multiply_adds_have_known_values():
    found = multiply_adds(published_size().architecture)
    giga = [round(each / 1e9, 2) for each in (found.convolution, found.linear, found.self_attention)]
    assert giga == [209.18, 129.92, 61.25]
    assert round(found.cross_attention / 1e9, 2) == 1.78
    assert training_flops(published_size().architecture) == pytest.approx(2.413e12, rel=1e-3)


def test_the_initial_prediction_is_zero_and_all_parameters_get_gradients():
    model = small_unet(zero_std=0.0)
    prediction = model(*inputs())
    assert torch.equal(prediction, torch.zeros_like(prediction))
    prediction.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_outputs_and_gradients_equal_the_definition():
    model, (x, t, context) = small_unet(), inputs()
    x.requires_grad_(), context.requires_grad_()
    state = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in to_published(dict(model.named_parameters()), SMALL).items()
    }
    wanted = velocity(x, t, context, state, SMALL)
    found = model(x, t, context)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3), dtype=wanted.dtype)
    theirs = torch.autograd.grad((wanted * weight).sum(), [x, context, *state.values()])
    ours = torch.autograd.grad((found * weight).sum(), [x, context, *model.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-9, atol=1e-11)
    names = [name for name, _ in model.named_parameters()]
    gradients = to_published(dict(zip(names, ours[2:], strict=True)), SMALL)
    for name, gradient in zip(state, theirs[2:], strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        assert gradient.abs().max() > 0, name


def test_activations_and_weights_are_channels_last():
    model = small_unet(torch.float32)
    layouts = []
    for _, block in model.blocks:
        block.register_forward_hook(lambda module, args, result: layouts.append(result))
    model(*inputs(dtype=torch.float32))
    maps = [result for result in layouts if isinstance(result, torch.Tensor) and result.dim() == 4]
    assert len(maps) == len(SMALL.blocks) + 1
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in maps)
    convolutions = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in convolutions)


def test_initial_weights_are_uniform_within_the_fan_ins_bound():
    model = UNet(SMALL, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    fan_in = {"input_blocks.1.0.in_layers.2.weight": 72, "time_embed.2.bias": 32, "caption_projections.weight": 6}
    for name, inputs_of_it in fan_in.items():
        bound = 1 / math.sqrt(inputs_of_it)
        largest = float(model.get_parameter(name).detach().abs().max())
        assert 0.9 * bound < largest <= bound, name
    first = model.time_projections.convolution_bias[:8]  # of 3 x 3 convolutions with 8 inputs
    assert 0 < float(first.detach().abs().max()) <= 1 / math.sqrt(72)
    zero = [name for name, parameter in model.named_parameters() if not parameter.any()]
    ends = (".out_layers.3", ".proj_out", "out.2")
    assert {name for name in zero if not name.endswith(".bias")} == {
        f"{name}.weight" for name, _ in model.named_modules() if name.endswith(ends)
    }


def test_the_global_generator_is_not_used():
    before = torch.random.get_rng_state()
    small_unet()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_bf16_is_close_to_the_definition():
    model, (x, t, context) = small_unet(torch.bfloat16), inputs(dtype=torch.bfloat16)
    state = {n: p.detach().double() for n, p in to_published(dict(model.named_parameters()), SMALL).items()}
    wanted = velocity(x.double(), t, context.double(), state, SMALL)
    error = (model(x, t, context).double() - wanted).norm() / wanted.norm()
    assert error < 0.03


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_groups": 3}, "norm_groups=3: a divisor of all channels"),
        ({"head_channels": 3}, "head_channels=3: a divisor of all channels"),
        ({"attention_levels": [4]}, r"attention_levels=\[4\]: there are levels 0 to 3"),
        ({"latent_size": 12}, "latent_size=12: a multiple of 8 for 4 levels"),
        ({"model_channels": 0}, "model_channels=0"),
    ],
)
def test_an_impossible_architecture_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        fixed_facts(Facts, "stable_diffusion", **change)


def test_an_unknown_implementation_is_an_error_with_the_option():
    for option in ("group_norm", "attention", "cross_attention", "geglu", "bias_gradient", "layer_norm", "upsampling"):
        with pytest.raises(UnsupportedImplementation, match=rf"^model\.implementations\.{option}=nosuch: "):
            UNet(SMALL, {option: "nosuch"}, device="meta")


def test_rows_and_maps_are_views():
    x_NCHW = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rows_RC = rows_of(x_NCHW)
    assert rows_RC[4 * 5 + 2 * 5 + 3].tolist() == x_NCHW[1, :, 2, 3].tolist()
    back = maps_of(rows_RC, x_NCHW)
    assert torch.equal(back, x_NCHW)
    assert back.data_ptr() == x_NCHW.data_ptr()


def test_rows_of_contiguous_tensors_are_refused():
    with pytest.raises(RuntimeError, match="view"):
        rows_of(torch.zeros(2, 4, 3, 5))


@pytest.fixture(name="diffusers")
def diffusers_or_skip() -> None:
    pytest.importorskip("diffusers")


def diffusers_network(model: UNet, shape: UNetArchitecture) -> torch.nn.Module:
    """Return diffusers' network with all tensors of ``model``."""
    network = build(shape).to(next(model.parameters()).dtype)
    published = to_published({name: p.detach() for name, p in model.named_parameters()}, shape)
    network.load_state_dict({diffusers_name(name, shape): tensor for name, tensor in published.items()})
    return network


@pytest.mark.usefixtures("diffusers")
def test_outputs_and_gradients_equal_diffusers():
    model, (x, t, context) = small_unet(), inputs()
    network = diffusers_network(model, SMALL)
    wanted = network(x, t, context, return_dict=False)[0]
    found = model(x, t, context)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # their time embedding is fp32
    wanted.square().sum().backward()
    found.square().sum().backward()
    theirs = {name: parameter.grad for name, parameter in network.named_parameters()}
    ours = to_published({name: parameter.grad for name, parameter in model.named_parameters()}, SMALL)
    assert len(ours) == len(theirs)
    for name, gradient in ours.items():
        other = theirs[diffusers_name(name, SMALL)]
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("diffusers")
def test_the_peer_has_our_number_of_parameters():
    facts = fixed_facts(Facts, "stable_diffusion")
    with torch.device("meta"):
        network = build(facts)
    assert sum(parameter.numel() for parameter in network.parameters()) == 865_910_724


@pytest.mark.usefixtures("diffusers")
def test_an_iteration_of_the_peer_changes_its_weights():
    network = build(SMALL)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    step = step_of(network, network, SMALL, 2, torch.device("cpu"))
    assert step().isfinite()
    assert not all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
