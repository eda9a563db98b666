"""Run the cases of the operations of a package through Triton's interpreter.

tests/test_operations.py runs this file, with the package in the environment variable ``OPERATION``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from typing import Any

import pytest
import torch

from common.ops.cases import Case, Draw
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import AUTO, REFERENCE
from tests.operation_checks import LIBRARIES, check, parameters

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")


def interpretable(key_of: Callable[[str, Case], object] | None = None) -> Iterator[Any]:
    """Yield the parameters of the package's tests.

    Args:
        key_of: returns a key for the name of an implementation and a case. Only the first test of each key is yielded;
            None for all tests.
    """
    for key, operation in all_operations().items():
        if key.partition(":")[0] == os.environ["OPERATION"]:
            seen = set()
            for each in parameters(key, operation, cases_of(operation), gpu=False):
                _, name, case, sizes, dtype = each.values
                if operation.unsupported(name, case.request(CPU, dtype, **sizes)) is None:
                    case_key = None if key_of is None else key_of(name, case)
                    if case_key is None or case_key not in seen:
                        yield each
                    seen.add(case_key)


@pytest.mark.parametrize(("operation", "name", "case", "sizes", "dtype"), list(interpretable()))
def test_kernels_give_what_the_reference_does(operation, name, case, sizes, dtype):
    check(operation, name, case, sizes, dtype, CPU)


OWN = [
    operation
    for key, operation in all_operations().items()
    if key.partition(":")[0] == os.environ["OPERATION"] and not LIBRARIES.issuperset(operation.fast)
]


@pytest.mark.parametrize("operation", OWN, ids=lambda operation: operation.name)
def test_auto_takes_a_kernel_for_the_sizes_of_every_recipe(operation):
    for case in cases_of(operation):
        own = [name for name in case.implementations(operation) if name not in LIBRARIES]
        if not case.only and any(operation.fast[name].automatic for name in own):
            assert operation.select(AUTO, case.request(CPU, case.dtypes[-1])).name != REFERENCE, case.name


def refusal(*arguments: Any, strided: Container[int]) -> str | None:
    """Return why the implementation refuses strided inputs; None if it gives what the reference does."""
    try:
        check(*arguments, CPU, strided=strided)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("operation", "name", "case", "sizes", "dtype"), list(interpretable(lambda name, case: name)))
def test_kernels_refuse_inputs_that_they_would_misread(operation, name, case, sizes, dtype):
    reason = refusal(operation, name, case, sizes, dtype, strided=range(1000))
    assert reason is None or "stride" in reason or "contiguous" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "name", "case", "sizes", "dtype"), list(interpretable(lambda name, case: (name, case.name)))
)
def test_kernels_refuse_each_input_that_they_would_misread(operation, name, case, sizes, dtype):
    draw = Draw(CPU, dtype)
    case.passes(operation.function(name), draw, **sizes)
    for number in range(draw.drawn):
        reason = refusal(operation, name, case, sizes, dtype, strided={number})
        assert reason is None or "stride" in reason or "contiguous" in reason, number
