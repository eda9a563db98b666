"""Test FLUX.1's network: parameters, initial weights, and outputs and gradients against diffusers."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch

from benchmarks.flux1.config import Facts
from benchmarks.flux1.model import Flux, Rotation, parameter_count, time_features
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts
from common.ops.linear import Linear
from common.ops.linear.fp8 import Fp8LinearProduct
from tests.benchmarks.flux1.public_names import diffusers_network, positions, to_diffusers
from tests.benchmarks.flux1.small_flux import SMALL, inputs, small_flux
from tests.counted_calls import Calls

PARAMETERS = {
    "image_in": 199_680,
    "text_in": 12_585_984,
    "time_in": 10_229_760,
    "caption_in": 11_802_624,
    **{f"double_blocks.{number}": 339_831_296 for number in range(19)},
    **{f"single_blocks.{number}": 141_591_808 for number in range(38)},
    "output": 19_077_184,
}
"""Parameters of every block of the rules' network."""


def published_size() -> Flux:
    """Return the network of the rules on the meta device."""
    return Flux(fixed_facts(Facts, "flux1"), device="meta", dtype=torch.bfloat16)


def test_every_block_has_the_references_number_of_parameters():
    model = published_size()
    counts = {name: sum(parameter.numel() for parameter in block.parameters()) for name, block in model.blocks}
    assert counts == PARAMETERS
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_891_178_560
    assert parameter_count(model.architecture) == 11_891_178_560


def test_a_sample_has_the_references_flops():
    shape = published_size().architecture
    assert shape.multiply_adds() == pytest.approx(3403e9, rel=2e-4)
    assert shape.training_flops() == pytest.approx(20.42e12, rel=1e-4)


def test_outputs_and_gradients_equal_those_of_diffusers():
    shape = dataclasses.replace(SMALL, feed_forward=4 * SMALL.hidden, rope_theta=10000.0, time_features=256)
    generator = torch.Generator().manual_seed(5)
    model, theirs = Flux(shape), diffusers_network(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    mapped = to_diffusers(dict(model.named_parameters()), shape)
    assert set(mapped) == {name for name, _ in theirs.named_parameters()}
    theirs.load_state_dict(mapped)
    x, text, caption, t = inputs(dtype=torch.float32)
    text_ids, image_ids = positions(shape)
    wanted = theirs(
        hidden_states=x, encoder_hidden_states=text, pooled_projections=caption, timestep=t, img_ids=image_ids,
        txt_ids=text_ids,
    ).sample  # fmt: skip
    found = model(x, text, caption, t)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weight = torch.randn(wanted.shape, generator=generator)
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    gradients = to_diffusers({name: parameter.grad for name, parameter in model.named_parameters()}, shape)
    for name, parameter in theirs.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


def test_the_initial_prediction_is_zero_and_all_parameters_get_gradients():
    model = small_flux(zero_std=0.0)
    prediction = model(*inputs())
    assert torch.equal(prediction, torch.zeros_like(prediction))
    prediction.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_initial_weights_are_those_of_the_reference():
    """Glorot's bound of a product is that of the published network, which joins two products of a single block."""
    shape = dataclasses.replace(SMALL, hidden=96, heads=4, feed_forward=256, rope_axes=(8, 8, 8), text_width=80)
    model = Flux(shape, None, lambda name: torch.Generator().manual_seed(len(name)))
    C, F = shape.hidden, shape.feed_forward
    sums = {
        "text_in": 80 + C, "image_in": 12 + C, "double_blocks.1.text.qkv": 4 * C, "double_blocks.0.image.proj": 2 * C,
        "double_blocks.0.image.up": C + F, "double_blocks.0.image.down": C + F, "single_blocks.2.qkv": 4 * C + F,
        "single_blocks.1.up": 4 * C + F, "single_blocks.0.proj": 2 * C + F, "single_blocks.0.down": 2 * C + F,
    }  # fmt: skip
    for name, features in sums.items():
        weight, bound = model.get_parameter(f"{name}.weight").detach(), math.sqrt(6 / features)
        assert 0.98 * bound < float(weight.abs().max()) <= bound, name
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    for name in ("time_in.first", "time_in.second", "caption_in.first", "caption_in.second"):
        assert float(model.get_parameter(f"{name}.weight").detach().std()) == pytest.approx(0.02, rel=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name.endswith("bias") or "modulation" in name or name.startswith("output."):
            assert not parameter.any(), name


def test_angles_of_a_token_are_those_of_its_row_and_column():
    rotation = Rotation(SMALL, torch.device("cpu"), torch.float64)
    text, row, column = SMALL.text_length, 2, 1
    token = text + row * SMALL.rows + column
    angles = [0.0, 0.0, *(row * 100.0 ** (-j / 4) for j in range(4)), *(column * 100.0 ** (-j / 2) for j in range(2))]
    wanted = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(rotation.cos_SJ[token], wanted.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(rotation.sin_SJ[token], wanted.sin(), rtol=0, atol=1e-15)
    assert torch.equal(rotation.cos_SJ[:text], torch.ones(text, 8, dtype=torch.float64))
    assert Rotation(SMALL, torch.device("cpu"), torch.bfloat16).cos_SJ.dtype == torch.float32


def test_time_features_are_cosines_then_sines():
    found = time_features(torch.tensor([0.375], dtype=torch.float64), 4, 10000.0, 1000.0)
    wanted = [math.cos(375), math.cos(3.75), math.sin(375), math.sin(3.75)]
    torch.testing.assert_close(found, torch.tensor([wanted], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("blocks", "operations"), [(1, 0), (3, 1), (5, 0), (0, 3), (0, 5)])
def test_recomputed_blocks_change_no_gradient(blocks, operations):
    gradients = []
    for recomputed in ({}, {"recomputed_blocks": blocks, "recomputed_operations": operations}):
        model = small_flux(**recomputed)
        model(*inputs()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def counted_backward(blocks: int, operations: int) -> tuple[int, int]:
    """Return the numbers of matrix products and of GELUs that the backward pass runs."""
    loss = small_flux(recomputed_blocks=blocks, recomputed_operations=operations)(*inputs()).square().sum()
    with Calls() as calls:
        loss.backward()
    return calls.counts["mm"] + calls.counts["addmm"], calls.counts["gelu"]


def test_only_blocks_that_recompute_everything_repeat_products():
    """The first two of the five blocks have two streams, of five products and a GELU each."""
    products, gelus = counted_backward(0, 0)
    assert gelus == 0
    assert counted_backward(0, 5) == (products, 7)
    assert counted_backward(1, 3) == (products + 10, 6)
    assert counted_backward(3, 1) == (products + 2 * 10 + 5, 6)


def weight_casts(model: Flux) -> Counter[str]:
    """Return the number of casts of weights to FP8 by layer, which later passes count up."""
    casts = Counter[str]()

    def count(name: str, address: int, product: Fp8LinearProduct) -> None:
        cast = product._cast

        def counted(x: torch.Tensor, *given: object) -> object:
            casts[name] += x.data_ptr() == address
            return cast(x, *given)

        product._cast = counted

    for name, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.product, Fp8LinearProduct):
            count(name, module.weight.data_ptr(), module.product)
    return casts


def test_recomputed_blocks_use_the_weights_that_the_forward_pass_has_cast_to_fp8():
    shape = dataclasses.replace(SMALL, heads=4, rope_axes=(2, 4, 2), latent_size=8, text_length=16)
    generator = torch.Generator().manual_seed(1)
    x, text, caption = (torch.randn(size, generator=generator) for size in ((2, 16, 12), (2, 16, 12), (2, 10)))
    gradients = []
    for blocks, operations in ((0, 0), (5, 0), (0, 5)):
        model = Flux(
            shape, {"linear": "fp8"}, lambda name: torch.Generator().manual_seed(len(name)), dtype=torch.bfloat16,
            recomputed_blocks=blocks, recomputed_operations=operations, zero_std=0.1,
        )  # fmt: skip
        casts = weight_casts(model)
        for _ in range(2):  # delayed scales are set after the first pass
            model.zero_grad()
            model(x, text, caption, torch.tensor([0.25, 0.5])).float().square().sum().backward()
        assert len(casts) == 2 * 8 + 3 * 4
        assert set(casts.values()) == {2}
        gradients.append([parameter.grad.double() for parameter in model.parameters()])
    for kept, everything, operations in zip(*gradients, strict=True):
        for again in (everything, operations):
            assert float((again - kept).norm() / kept.norm()) < 0.2


def test_recomputed_blocks_keep_only_their_inputs():
    def kept(recomputed: int) -> int:
        storages = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        model = small_flux(recomputed_blocks=recomputed)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result = model(*inputs(samples=8))
        assert result.requires_grad
        return sum(size for address, size in storages.items() if address not in own)

    assert kept(5) < 0.3 * kept(0)


def test_samples_do_not_influence_each_other():
    model, given = small_flux(), inputs(samples=4)
    whole = model(*given)
    torch.testing.assert_close(model(*(x[1:3] for x in given)), whole[1:3], rtol=1e-12, atol=1e-13)


def test_bf16_is_close_to_fp64():
    exact, half = small_flux(), small_flux(torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())
    given = inputs(dtype=torch.bfloat16)
    with torch.no_grad():
        wanted, found = exact(*(x.double() for x in given)), half(*given).double()
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


def test_the_global_generator_is_not_used():
    before = torch.random.get_rng_state()
    small_flux()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 33}, "hidden=33: a multiple of heads=2"),
        ({"rope_axes": (4, 8, 8)}, r"rope_axes=\[4, 8, 8\]: three even numbers with the sum hidden / heads = 16"),
        ({"rope_axes": (3, 9, 4)}, "three even numbers"),
        ({"time_features": 15}, "time_features=15: an even number"),
        ({"latent_size": 7}, "latent_size=7: a multiple of patch=2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)
