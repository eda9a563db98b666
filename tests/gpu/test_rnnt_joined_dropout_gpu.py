"""Dropout with joined frames on a GPU, at the encoder's size, against the reference."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rnnt.ops import joined_dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "p"), [((642, 192, 1024), 0.1), ((41, 7, 1024), 0.1), ((5, 3, 66), 0.3), ((6, 8, 128), 0.0)]
)
def test_both_directions_are_those_of_the_reference(shape, p, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    x_TBH = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    seed = torch.tensor(9, device="cuda")
    results = []
    for name in ("triton", "reference"):
        leaf = x_TBH.clone().requires_grad_()
        y_SBK = joined_dropout.JOINED_DROPOUT.function(name)(leaf, p, seed, 4)
        dy_SBK = torch.randn(y_SBK.shape, generator=generator.manual_seed(2), device="cuda").to(dtype)
        y_SBK.backward(dy_SBK)
        results.append((y_SBK.detach(), leaf.grad))
    (y, dx), (expected_y, expected_dx) = results
    assert torch.equal(y, expected_y)
    torch.testing.assert_close(dx, expected_dx)
