"""The U-Net: parameters, outputs and gradients against its definition and against diffusers, and its start."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.published_names import from_published, to_published
from benchmarks.stable_diffusion.unet_architecture import multiply_adds, training_flops
from common.errors import CheckpointError, ConfigError, UnsupportedImplementation
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.stable_diffusion.small_unet import SMALL, inputs, small_unet
from tests.benchmarks.stable_diffusion.unet_oracle import velocity
from tests.capturable import Capturable

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
"""Of every block, counted from the reference's network."""


def published_size() -> UNet:
    """The rules' network without memory."""
    return UNet(fixed_facts(Facts, "stable_diffusion"), device="meta", dtype=torch.float16)


def block_of(name: str) -> str:
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first.endswith("put_blocks") else first


def test_every_block_has_as_many_parameters_as_the_references():
    model, counts = published_size(), Counter[str]()
    for name, parameter in to_published(dict(model.named_parameters()), model.architecture).items():
        counts[block_of(name)] += parameter.numel()
    assert counts == PARAMETERS
    assert sum(parameter.numel() for parameter in model.parameters()) == 865_910_724


def test_multiply_adds_are_those_of_the_layers_that_the_rules_name():
    found = multiply_adds(published_size().architecture)
    giga = [round(each / 1e9, 2) for each in (found.convolution, found.linear, found.self_attention)]
    assert giga == [209.18, 129.92, 61.25]
    assert round(found.cross_attention / 1e9, 2) == 1.78
    assert training_flops(published_size().architecture) == pytest.approx(2.413e12, rel=1e-3)


def test_the_first_prediction_is_zero_and_no_gradient_is_missing():
    model = small_unet(zero_std=0.0)
    prediction = model(*inputs())
    assert torch.equal(prediction, torch.zeros_like(prediction))
    prediction.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_outputs_and_all_gradients_are_those_of_the_definition():
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


def test_everything_stays_in_channels_last_memory():
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


def test_keys_and_values_that_were_made_before_give_the_same_prediction():
    model, (x, t, context) = small_unet(), inputs()
    torch.testing.assert_close(model(x, t, keys_values=model.cross_keys_values(context)), model(x, t, context))
    for wrong in ({}, {"context_NTK": context, "keys_values": model.cross_keys_values(context)}):
        with pytest.raises(ValueError, match="either the encoded captions or their keys"):
            model(x, t, **wrong)


def test_published_tensors_load_and_come_back():
    model, other = small_unet(), small_unet(seed=1)
    published = to_published(dict(model.named_parameters()), SMALL)
    other.load_state_dict(from_published(published, SMALL))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    del published["middle_block.1.transformer_blocks.0.attn1.to_k.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor 'middle_block.1.transformer_blocks.0.attn1.to_k.weight'"):
        from_published(published, SMALL)


def test_initial_weights_are_uniform_up_to_the_root_of_the_fan_in():
    model = UNet(SMALL, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    fan_in = {"input_blocks.1.0.in_layers.2.weight": 72, "time_embed.2.bias": 32, "caption_projections.weight": 6}
    for name, inputs_of_it in fan_in.items():
        bound = 1 / math.sqrt(inputs_of_it)
        largest = float(model.get_parameter(name).detach().abs().max())
        assert 0.9 * bound < largest <= bound, name
    first = model.time_projections.convolution_bias[:8]  # behind 8 channels, 3 x 3
    assert 0 < float(first.detach().abs().max()) <= 1 / math.sqrt(72)
    zero = [name for name, parameter in model.named_parameters() if not parameter.any()]
    ends = (".out_layers.3", ".proj_out", "out.2")
    assert {name for name in zero if not name.endswith(".bias")} == {
        f"{name}.weight" for name, _ in model.named_modules() if name.endswith(ends)
    }


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.random.get_rng_state()
    small_unet()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_precision_stays_near_the_definition():
    model, (x, t, context) = small_unet(torch.bfloat16), inputs(dtype=torch.bfloat16)
    state = {n: p.detach().double() for n, p in to_published(dict(model.named_parameters()), SMALL).items()}
    wanted = velocity(x.double(), t, context.double(), state, SMALL)
    error = (model(x, t, context).double() - wanted).norm() / wanted.norm()
    assert error < 0.03


def test_forward_and_backward_can_be_captured():
    model, batch = small_unet(torch.float32), inputs(dtype=torch.float32)
    with Capturable():
        model(*batch).square().mean().backward()


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
def test_a_shape_without_sense_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        fixed_facts(Facts, "stable_diffusion", **change)


def test_an_unknown_implementation_names_its_option():
    for option in ("group_norm", "attention", "cross_attention", "geglu", "bias_gradient", "layer_norm", "upsampling"):
        with pytest.raises(UnsupportedImplementation, match=rf"^model\.implementations\.{option}=nosuch: "):
            UNet(SMALL, {option: "nosuch"}, device="meta")
