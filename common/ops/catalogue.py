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
    """Return all operations by ``package:NAME``: the shared ones and those of the workloads."""
    found = {}
    for folder in (_ROOT / "common/ops", *sorted(_ROOT.glob("benchmarks/*/ops"))):
        for path in sorted(folder.glob("*/__init__.py")):
            declared = re.findall(r"^(\w+)(?:: \w+)? = Operation\(", path.read_text(), re.MULTILINE)
            package = ".".join(path.parent.relative_to(_ROOT).parts)
            for name in declared:
                found[f"{package}:{name}"] = getattr(importlib.import_module(package), name)
    return found


def cases_of(operation: Operation) -> tuple[Case, ...]:
    """Return the cases of an operation; empty if it declares none."""
    if not operation.cases:
        return ()
    module, _, attribute = operation.cases.partition(":")
    cases: tuple[Case, ...] = getattr(importlib.import_module(module), attribute or "CASES")
    return cases
