"""Test weight gradients from FP8 operands, which are added to the gradient, against float64."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2
from common.ops.weight_gradient import accumulate_reference, cublaslt

CPU = torch.device("cpu")


def operands(outputs: int, inputs: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dy, x and the inverses of their scales."""
    generator = torch.Generator().manual_seed(outputs)
    dy, x = (torch.randn(rows, tokens, generator=generator) for rows in (outputs, inputs))
    return (dy * 64).to(E5M2), (x * 16).to(E4M3), torch.tensor(1.0 / 64), torch.tensor(1.0 / 16)


def product(dy: Tensor, x: Tensor, dy_inverse: Tensor, x_inverse: Tensor) -> Tensor:
    return (dy.double() * dy_inverse.double()) @ (x.double() * x_inverse.double()).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_add_up(dtype):
    given = operands(48, 32, 64)
    gradient = torch.ones(48, 32, dtype=dtype)
    taken = []

    def allocate(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        taken.append(tuple(shape))
        return torch.full(shape, float("nan"), dtype=of)

    for _ in range(2):
        accumulate_reference(*given, gradient, allocate)
    wanted = 1.0 + 2.0 * product(*given)
    assert float((gradient.double() - wanted).norm() / wanted.norm()) < (2**-8 if dtype == torch.bfloat16 else 1e-5)
    assert taken == [(48, 32)] * 2


def test_cublaslt_keeps_its_settings():
    """The structures and constants are ours. If cuBLASLt is installed, it returns the attributes that it has read."""
    try:
        library = cublaslt.library()
    except OSError as error:
        pytest.skip(str(error))
    description, layout = cublaslt._description(512, 1024), cublaslt._layout(E5M2, 4096, 512)

    def queried(name: str, of: ctypes.c_void_p, attribute: int, kind: type[Any]) -> int:
        value, written = kind(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(kind))
        assert (
            getattr(library, name)(of, ctypes.c_int(attribute), ctypes.byref(value), size, ctypes.byref(written)) == 0
        )
        assert written.value == ctypes.sizeof(kind)
        return int(value.value)

    of_product = functools.partial(queried, "cublasLtMatmulDescGetAttribute", description)
    assert of_product(cublaslt._A_SCALE_POINTER, ctypes.c_void_p) == 512
    assert of_product(cublaslt._B_SCALE_POINTER, ctypes.c_void_p) == 1024
    assert of_product(cublaslt._TRANSA, ctypes.c_int32) == 1
    assert of_product(cublaslt._FAST_ACCUM, ctypes.c_int8) == 1
    of_matrix = functools.partial(queried, "cublasLtMatrixLayoutGetAttribute", layout)
    assert of_matrix(0, ctypes.c_uint32) == cublaslt._TYPES[E5M2]
    assert [of_matrix(attribute, ctypes.c_uint64) for attribute in (2, 3)] == [4096, 512]
    assert of_matrix(4, ctypes.c_int64) == 4096, "columns lie one after another"
    assert ctypes.sizeof(cublaslt._Heuristic) == 64 + 8 + 4 + 4 + 16


def test_cublaslt_says_which_call_failed():
    try:
        cublaslt.library()
    except OSError as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulDescSetAttribute failed .*INVALID_VALUE"):
        cublaslt._call("cublasLtMatmulDescSetAttribute", None, ctypes.c_int(3), None, ctypes.c_size_t(4))
