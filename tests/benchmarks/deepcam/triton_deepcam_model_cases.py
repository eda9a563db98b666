"""The network with Triton's kernels against float64; run by tests/test_interpreted_kernels.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.deepcam.config import Facts
from benchmarks.deepcam.model import OPERATIONS, DeepLab
from common.mlperf.fixed import fixed_facts

NARROW = fixed_facts(
    Facts,
    "deepcam",
    image_size=[64, 64],
    stem=[8, 8],
    entry=[8, 16, 24],
    middle_blocks=1,
    exit=[24, 16, 16, 24],
    decoder=8,
    low_level=8,
)


def logits_and_gradients(implementation: str, dtype: torch.dtype, low_level_relu: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    network = DeepLab(NARROW, low_level_relu, generator).cast(dtype)
    asked = dict.fromkeys(OPERATIONS, implementation)
    assert network.choose_implementations(asked, dtype) == asked
    x_NHWC = torch.randn(2, 64, 64, 16, generator=generator)
    logits = network(x_NHWC.to(dtype).movedim(-1, 1))
    d_logits = torch.randn(logits.shape, generator=generator)
    names, parameters = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(logits, parameters, d_logits.to(logits.dtype))
    return {"logits": logits.detach(), **dict(zip(names, gradients, strict=True)), **dict(network.named_buffers())}


@pytest.mark.parametrize("low_level_relu", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logits_gradients_and_statistics_are_those_of_the_reference(low_level_relu):
    found = logits_and_gradients("triton", torch.float32, low_level_relu)
    for name, expected in logits_and_gradients("reference", torch.float64, low_level_relu).items():
        error = float((found[name].double() - expected).norm() / expected.norm())
        assert error < 1e-3, f"{name}: relative error {error:.2e}"
