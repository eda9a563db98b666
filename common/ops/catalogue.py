"""Catalogue of all operations of the suite and their cases."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

from common.ops.cases import Case
from common.ops.operation import Operation

_ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def all_operations() -> dict[str, Operation]:
    """Return all operations by ``module:NAME``: the shared ones, the update rules and those of the workloads."""
    found = {}
    for pattern in ("common/ops/*/__init__.py", "common/optim/*.py", "benchmarks/*/ops/*/__init__.py"):
        for path in sorted(_ROOT.glob(pattern)):
            declared = re.findall(r"^(\w+)(?:: \w+)? = Operation\(", path.read_text(), re.MULTILINE)
            module = ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
            for name in declared:
                found[f"{module}:{name}"] = getattr(importlib.import_module(module), name)
    return found


def cases_of(operation: Operation) -> tuple[Case, ...]:
    """Return the cases of an operation; empty if it declares none."""
    if not operation.cases:
        return ()
    module, _, attribute = operation.cases.partition(":")
    cases: tuple[Case, ...] = getattr(importlib.import_module(module), attribute or "CASES")
    return cases
