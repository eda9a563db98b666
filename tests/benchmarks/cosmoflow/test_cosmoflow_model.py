"""The network of CosmoFlow: its layers, its initial weights, and parity with a plain model of Keras's weights."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cosmoflow.model import CosmoFlow, CosmoFlowArchitecture
from benchmarks.cosmoflow.peer import PlainNetwork
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts

REAL = fixed_facts(CosmoFlowArchitecture, "cosmoflow")
SMALL = CosmoFlowArchitecture(size=8, filters=(5, 6), hidden=(9, 7), slope=0.3, output_scale=1.2)

LAYERS = {
    "conv1": (3_488, 14.50), "conv2": (55_360, 28.99), "conv3": (221_312, 14.50), "conv4": (884_992, 7.25),
    "conv5": (3_539_456, 3.62), "dense1": (4_194_432, 0.008), "dense2": (8_256, 0.0), "output": (260, 0.0),
}  # fmt: skip
"""Parameters and forward GFLOPs of the layers of the MLPerf HPC network, counted by hand."""


def network(dropout: float = 0.0, seed: int = 4) -> CosmoFlow:
    return CosmoFlow(SMALL, dropout, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counts(samples: int = 3, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(60, (samples, size, size, size, 4), generator=generator, dtype=torch.int16)


def test_layers_have_the_parameters_and_the_flops_of_the_benchmark():
    made = CosmoFlow(REAL, device="meta")
    found = {name: sum(part.numel() for part in layer.parameters()) for name, layer in made.named_children()}
    assert found == {name: parameters for name, (parameters, _) in LAYERS.items()}
    assert sum(found.values()) == 8_907_556
    flops = REAL.forward_flops()
    assert {name: flops[name] / 1e9 for name in LAYERS} == pytest.approx(
        {name: giga for name, (_, giga) in LAYERS.items()}, abs=0.006
    )
    assert REAL.training_flops() / 1e9 == pytest.approx(192.1, abs=0.05)


def keras_weights(made: CosmoFlow) -> list[tuple[Tensor, Tensor]]:
    """Return kernels and biases as Keras stores them: (d, h, w, in, out) of convolutions, (in, out) of dense layers."""
    layers = dict(made.named_children()).values()
    return [(layer.weight.permute(2, 3, 4, 1, 0) if layer.weight.ndim == 5 else layer.weight.T, layer.bias)
            for layer in layers]  # fmt: skip


def plain(weights: list[tuple[Tensor, Tensor]], counts_NDHWC: Tensor) -> Tensor:
    """The network as one function of Keras's weights, in NDHWC."""
    x = torch.log(counts_NDHWC.double() + 1)
    for kernel, bias in weights:
        if kernel.ndim == 5:
            N, D, H, W, _ = x.shape
            padded = F.pad(x, (0, 0, 1, 1, 1, 1, 1, 1))
            taps = [(d, h, w) for d in range(3) for h in range(3) for w in range(3)]
            x = bias + sum(padded[:, d : d + D, h : h + H, w : w + W] @ kernel[d, h, w] for d, h, w in taps)
            x = torch.where(x > 0, x, 0.3 * x)
            x = x.reshape(N, D // 2, 2, H // 2, 2, W // 2, 2, -1).amax((2, 4, 6))
        else:
            x = x.reshape(len(x), -1) @ kernel + bias
            x = torch.where(x > 0, x, 0.3 * x) if kernel is not weights[-1][0] else 1.2 * torch.tanh(x)
    return x


def test_estimates_and_gradients_are_those_of_a_plain_model_with_keras_weights():
    made = network()
    for layer in made.children():
        torch.nn.init.normal_(layer.bias, std=0.1, generator=torch.Generator().manual_seed(2))
    expected = plain(keras_weights(made), counts())
    found = made(counts())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    names, parameters = zip(*made.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected))
    for name, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_the_network_of_the_peer_is_the_same_function():
    made, peer = network(), PlainNetwork(SMALL, 0.0).double()
    layers = [module for module in peer.modules() if isinstance(module, torch.nn.Conv3d | torch.nn.Linear)]
    for ours, theirs in zip(made.children(), layers, strict=True):
        theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(peer(counts()), made(counts()), rtol=1e-12, atol=1e-12)


def test_estimates_stay_within_the_scaled_range_of_tanh():
    made = network()
    made.output.bias.data.copy_(torch.tensor([50.0, -50.0, 0.0, 1.0]))
    found = made(counts())
    assert found[:, 0].tolist() == pytest.approx([1.2] * 3)
    assert found[:, 1].tolist() == pytest.approx([-1.2] * 3)


def test_initial_kernels_fill_glorots_interval_and_biases_are_zero():
    made = CosmoFlow(SMALL, generator=torch.Generator().manual_seed(0))
    bounds = {
        "conv1": math.sqrt(6 / (27 * (4 + 5))), "conv2": math.sqrt(6 / (27 * (5 + 6))),
        "dense1": math.sqrt(6 / (48 + 9)), "dense2": math.sqrt(6 / (9 + 7)),
    }  # fmt: skip
    for name, bound in bounds.items():
        layer = made.get_submodule(name)
        assert 0.9 * bound < layer.weight.abs().max() <= bound, name
        assert abs(layer.weight.mean()) < 0.2 * bound, name
        assert not layer.bias.any()


def test_dropout_follows_the_seed_in_training_only():
    made = network(dropout=0.5)
    one, again, other = (made(counts(), torch.tensor(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    made.eval()
    torch.testing.assert_close(made(counts()), plain(keras_weights(made), counts()), rtol=1e-12, atol=1e-12)


def test_both_hidden_layers_drop_outputs_with_masks_of_their_own():
    made = network(dropout=0.5)
    inputs = []
    for layer in (made.dense2, made.output):
        layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    made(counts(64), torch.tensor(7))
    zeros = [(x == 0).double().mean().item() for x in inputs]
    assert zeros == pytest.approx([0.5, 0.5], abs=0.1)
    assert not torch.equal(inputs[0][:, :7] == 0, inputs[1] == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"size": 100}, "size=100: 5 convolutions halve the edges, so it must be a multiple of 32"),
     ({"filters": []}, "one or more positive numbers"), ({"hidden": [8, 0]}, "one or more positive numbers"),
     ({"slope": 0.0}, "positive and finite")],
)  # fmt: skip
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        fixed_facts(CosmoFlowArchitecture, "cosmoflow", **changes)
