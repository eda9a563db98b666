"""The whole U-Net on Triton's kernels, interpreted: every kind of block hands on what the next one takes."""

from __future__ import annotations

import torch

from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.unet_operations import OPERATIONS
from common.ops.operation import REFERENCE
from tests.benchmarks.stable_diffusion.small_unet import SMALL, inputs, small_unet


def test_outputs_and_gradients_are_those_of_the_references():
    names = dict.fromkeys(("group_norm", "layer_norm", "geglu", "bias_gradient"), "triton")
    model = UNet(SMALL, {**names, "upsampling": "transposed"})
    references = small_unet(torch.float32, implementations=dict.fromkeys(OPERATIONS, REFERENCE))
    model.load_state_dict(references.state_dict())
    found, wanted = (each(*inputs(1, torch.float32)) for each in (model, references))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for prediction in (found, wanted):
        prediction.square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), references.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert (a.grad - b.grad).norm() < 1e-4 * b.grad.norm(), name
