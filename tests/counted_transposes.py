"""Count the transposes that FP8 products make on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from common.ops.operation import Implementation
from common.ops.transpose_fp8 import TRANSPOSE_FP8


def counted_transposes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list to which products that are made later append every matrix that they transpose."""
    reference, transposed = TRANSPOSE_FP8.reference, list[Tensor]()

    def counted(matrix: Tensor, *rest: Any) -> Tensor:
        transposed.append(matrix)
        result: Tensor = reference(matrix, *rest)
        return result

    monkeypatch.setitem(TRANSPOSE_FP8.fast, "counted", Implementation(counted))
    return transposed
