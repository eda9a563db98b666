"""Weight gradients out of FP8, added to what is there, against float64; kernels of GPUs say why they can't run here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.ops import weight_gradient
from common.ops.fp8_cast.plain import E4M3, E5M2
from common.ops.implementation import AUTO, OperationRequest, select
from common.ops.weight_gradient.plain import accumulate_torch

CPU = torch.device("cpu")


def operands(outputs: int, inputs: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x and the inverses of their scales."""
    generator = torch.Generator().manual_seed(outputs)
    dy, x = (torch.randn(rows, tokens, generator=generator) for rows in (outputs, inputs))
    return (dy * 64).to(E5M2), (x * 16).to(E4M3), torch.tensor(1.0 / 64), torch.tensor(1.0 / 16)


def product(dy: Tensor, x: Tensor, dy_inverse: Tensor, x_inverse: Tensor) -> Tensor:
    return (dy.double() * dy_inverse.double()) @ (x.double() * x_inverse.double()).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_add_up(dtype: torch.dtype) -> None:
    given = operands(48, 32, 64)
    gradient = torch.ones(48, 32, dtype=dtype)
    taken: list[tuple[int, ...]] = []

    def room(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        taken.append(tuple(shape))
        return torch.full(shape, float("nan"), dtype=of)

    for _ in range(2):
        accumulate_torch(*given, gradient, room)
    wanted = 1.0 + 2.0 * product(*given)
    assert float((gradient.double() - wanted).norm() / wanted.norm()) < (2**-8 if dtype == torch.bfloat16 else 1e-5)
    assert taken == [(48, 32)] * 2


def test_a_cpu_takes_the_plain_one_and_kernels_say_why_not() -> None:
    request = OperationRequest(CPU, torch.bfloat16)
    assert select(weight_gradient.IMPLEMENTATIONS, AUTO, request).name == "torch"
    for name, why in (("cublaslt", "CUDA device"), ("te", "CUDA device"), ("triton", "GPU")):
        with pytest.raises(UnsupportedImplementation, match=why):
            select(weight_gradient.IMPLEMENTATIONS, name, request)
