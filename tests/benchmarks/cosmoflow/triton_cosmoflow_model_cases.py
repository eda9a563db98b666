"""The network out of our kernels against the references in float64; run by tests/test_interpreted_kernels.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cosmoflow.model import OPERATIONS, CosmoFlow, CosmoFlowArchitecture

pytestmark = pytest.mark.usefixtures("bfloat16_products")

ARCHITECTURE = CosmoFlowArchitecture(size=16, filters=(5, 16), hidden=(9, 7), slope=0.3, output_scale=1.2)


def estimates_and_gradients(implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = CosmoFlow(ARCHITECTURE, 0.5, dict.fromkeys(OPERATIONS, implementation), generator, dtype=dtype)
    assert set(model.chosen().values()) == {implementation}
    counts_NDHWC = torch.randint(40, (2, 16, 16, 16, 4), generator=generator, dtype=torch.int16)
    estimates = model(counts_NDHWC, torch.tensor(11))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(estimates.square().sum(), parameters)
    return {"estimates": estimates.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
def test_estimates_and_gradients_are_close_to_the_references(dtype, tolerance):
    found = estimates_and_gradients("triton", dtype)
    for name, expected in estimates_and_gradients("reference", torch.float64).items():
        error = float((found[name].double() - expected).norm() / expected.norm())
        assert error < tolerance, f"{name}: relative error {error:.2e}"
