"""Run every case of every operation on a GPU, in each implementation that this machine supports.

With ``OPERATION=common.ops.row_norm`` in the environment, only that package is tested.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from common.ops.cases import Case
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import Operation
from tests.operation_checks import check, parameters

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("operation", "name", "case", "sizes", "dtype"),
    [
        each
        for key, operation in all_operations().items()
        if os.environ.get("OPERATION") in (None, key.partition(":")[0])
        for each in parameters(key, operation, cases_of(operation), gpu=True)
    ],
)
def test_an_implementation_gives_what_the_reference_does(
    operation: Operation, name: str, case: Case, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    if reason := operation.unsupported(name, case.request(GPU, dtype, **sizes)):
        pytest.skip(reason)
    check(operation, name, case, sizes, dtype, GPU)
