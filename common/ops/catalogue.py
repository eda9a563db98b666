"""All operations of the suite."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from common.ops.cases import Case
from common.ops.operation import Operation

_ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def all_operations() -> dict[str, Operation]:
    """Package of an operation, as a dotted name, to the operation; the shared ones and those of all workloads."""
    found = {}
    for folder in (_ROOT / "common/ops", *sorted(_ROOT.glob("benchmarks/*/ops"))):
        for path in sorted(folder.glob("*/__init__.py")):
            package = ".".join(path.parent.relative_to(_ROOT).parts)
            for value in vars(importlib.import_module(package)).values():
                if isinstance(value, Operation):
                    found[package] = value
    return found


def cases_of(operation: Operation) -> tuple[Case, ...]:
    """Cases of an operation; none of one that names no module."""
    if not operation.cases:
        return ()
    cases: tuple[Case, ...] = importlib.import_module(operation.cases).CASES
    return cases
