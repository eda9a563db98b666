"""Replace the faster implementations of operations by their references in a test."""

from __future__ import annotations

import dataclasses

import pytest

from common.ops.operation import Operation, runs_anywhere


def run_references(monkeypatch: pytest.MonkeyPatch, *operations: Operation) -> None:
    """Let every implementation of ``operations`` run the reference, on every device, until the end of the test."""
    for operation in operations:
        for name in operation.fast:
            replaced = dataclasses.replace(operation.fast[name], source=operation.reference, unsupported=runs_anywhere)
            monkeypatch.setitem(operation.fast, name, replaced)
