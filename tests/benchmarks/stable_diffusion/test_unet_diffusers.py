"""The U-Net against diffusers' with the same weights, and the peer that is timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.peer import build, step_of
from benchmarks.stable_diffusion.published_names import to_published
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.stable_diffusion.diffusers_names import diffusers_name
from tests.benchmarks.stable_diffusion.small_unet import SMALL, inputs, small_unet

pytest.importorskip("diffusers")


def theirs_with_weights_of(model: UNet, shape: UNetArchitecture) -> torch.nn.Module:
    """diffusers' network in the dtype of ``model``; every tensor of both is used."""
    network = build(shape).to(next(model.parameters()).dtype)
    published = to_published({name: p.detach() for name, p in model.named_parameters()}, shape)
    network.load_state_dict({diffusers_name(name, shape): tensor for name, tensor in published.items()})
    return network


def test_outputs_and_all_gradients_are_those_of_diffusers():
    model, (x, t, context) = small_unet(), inputs()
    network = theirs_with_weights_of(model, SMALL)
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


def test_the_peer_trains_the_parameters_that_we_train():
    facts = fixed_facts(Facts, "stable_diffusion")
    with torch.device("meta"):
        network = build(facts)
    assert sum(parameter.numel() for parameter in network.parameters()) == 865_910_724


def test_an_iteration_of_the_peer_changes_its_weights():
    network = build(SMALL)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    step = step_of(network, network, SMALL, 2, torch.device("cpu"))
    assert step().isfinite()
    assert not all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
