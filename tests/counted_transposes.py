"""The transposes that FP8 products make on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from common.ops import transpose_fp8


def counted_transposes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list that gets every matrix that products made from now on transpose."""
    plain, turned = transpose_fp8.IMPLEMENTATIONS["torch"], list[Tensor]()

    def counted(matrix: Tensor, *rest: Any) -> Tensor:
        turned.append(matrix)
        result: Tensor = plain.function(matrix, *rest)
        return result

    monkeypatch.setitem(transpose_fp8.IMPLEMENTATIONS, "torch", dataclasses.replace(plain, function=counted))
    return turned
