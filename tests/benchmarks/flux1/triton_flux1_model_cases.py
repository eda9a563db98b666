"""Test the whole network of FLUX.1 with Triton's kernels in the interpreter."""

import pytest
import torch

from benchmarks.flux1.model import OPERATIONS, Flux
from common.ops.operation import REFERENCE
from tests.benchmarks.flux1.small_flux import SMALL, inputs, small_flux

KERNELS = ("modulated_norm", "gated_residual", "qk_norm_rope", "gelu")


@pytest.mark.parametrize("recomputed", [{}, {"recomputed_blocks": 1, "recomputed_operations": 4}])
@pytest.mark.usefixtures("poisoned_memory")
def test_outputs_and_gradients_equal_the_references(recomputed):
    model = Flux(SMALL, dict.fromkeys(KERNELS, "triton"), **recomputed)
    references = Flux(SMALL, dict.fromkeys(OPERATIONS, REFERENCE))
    references.load_state_dict(small_flux(torch.float32).state_dict())
    model.load_state_dict(references.state_dict())
    found, wanted = (each(*inputs(2, torch.float32)) for each in (model, references))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for prediction in (found, wanted):
        prediction.square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), references.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert (a.grad - b.grad).norm() < 1e-4 * b.grad.norm(), name
