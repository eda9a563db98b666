"""Run the cases of the operations of a package through Triton's interpreter.

tests/test_operations.py runs this file, with the package in the environment variable ``OPERATION``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.ops.cases import Case
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import Operation
from tests.operation_checks import check, parameters

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")


def interpretable(*, smallest: bool = False) -> Iterator[Any]:
    """Yield the parameters of the package's tests; if ``smallest``, the first test of each operation."""
    for key, operation in all_operations().items():
        if key.partition(":")[0] == os.environ["OPERATION"]:
            seen = set()
            for each in parameters(key, operation, cases_of(operation), gpu=False):
                _, name, case, sizes, dtype = each.values
                if operation.unsupported(name, case.request(CPU, dtype, **sizes)) is None:
                    if not smallest or name not in seen:
                        yield each
                    seen.add(name)


@pytest.mark.parametrize(("operation", "name", "case", "sizes", "dtype"), list(interpretable()))
def test_kernels_give_what_the_reference_does(
    operation: Operation, name: str, case: Case, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    check(operation, name, case, sizes, dtype, CPU)


@pytest.mark.parametrize(("operation", "name", "case", "sizes", "dtype"), list(interpretable(smallest=True)))
def test_kernels_refuse_inputs_that_they_would_misread(
    operation: Operation, name: str, case: Case, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    refusal = "not contiguous"
    try:
        check(operation, name, case, sizes, dtype, CPU, strided=True)
    except ValueError as error:
        refusal = str(error)
    assert "stride" in refusal or "contiguous" in refusal
