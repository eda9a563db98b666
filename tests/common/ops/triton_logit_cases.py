"""The kernels of a linear layer with one output against its formula in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch

from common.errors import UnsupportedImplementation
from common.ops import logit
from common.ops.logit import triton
from common.ops.operation import AUTO, OperationRequest
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FUSED = logit.LOGIT.function("fused")


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, of which there are several."""
    for key in triton.TILES:
        monkeypatch.setitem(triton.TILES, key, triton.Tile(512, 4))


def close(found: torch.Tensor, formula: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - formula).norm() < TOLERANCE[dtype] * formula.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("samples", "inputs"), [(16, 64), (37, 40), (3, 700)], ids=["even", "odd", "long"])
def test_logits_and_gradients_are_the_formulas(samples: int, inputs: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(inputs)
    x, weight, bias, dlogit = (
        torch.randn(shape, generator=random) for shape in ((samples, inputs), (1, inputs), (1,), (samples,))
    )
    leaves = [value.to(dtype).requires_grad_() for value in (x, weight, bias)]
    found = FUSED(*leaves)
    gradients = torch.autograd.grad(found, leaves, dlogit)
    x, weight, bias = (leaf.detach().double() for leaf in leaves)
    assert found.dtype == torch.float32
    assert close(found, torch.einsum("bk,k->b", x, weight[0]) + bias, torch.float32)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]
    dlogit = dlogit.double()
    formulas = torch.outer(dlogit, weight[0]), torch.einsum("b,bk->k", dlogit, x)[None], dlogit.sum()[None]
    assert all(close(*pair, dtype) for pair in zip(gradients, formulas, strict=True))


def test_both_directions_are_capturable_with_a_gradient_of_a_mean() -> None:
    """Which is one element, repeated without memory."""
    leaves = [torch.ones(5, 8).requires_grad_(), torch.ones(1, 8).requires_grad_(), torch.ones(1).requires_grad_()]
    with Capturable():
        gradients = torch.autograd.grad(FUSED(*leaves).mean(), leaves)
    assert torch.allclose(gradients[1], torch.ones(1, 8))
    assert torch.allclose(gradients[2], torch.ones(1))


def test_rows_that_do_not_fit_are_left_to_pytorch() -> None:
    def request(inputs: int) -> OperationRequest:
        return OperationRequest(torch.device("cpu"), torch.bfloat16, {"inputs": inputs})

    assert logit.LOGIT.select(AUTO, request(2048)).name == "fused"
    assert logit.LOGIT.select(AUTO, request(2049)).name == "reference"
    with pytest.raises(UnsupportedImplementation, match="inputs is at most 2048, not 2049"):
        logit.LOGIT.select("fused", request(2049))


def test_no_samples() -> None:
    leaves = [torch.ones(0, 8).requires_grad_(), torch.ones(1, 8).requires_grad_(), torch.ones(1).requires_grad_()]
    gradients = torch.autograd.grad(FUSED(*leaves).sum(), leaves)
    assert gradients[0].shape == (0, 8)
    assert not gradients[1].any()
    assert not gradients[2].any()
