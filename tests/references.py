"""The reference in the place of an operation's other implementations, for tests of what surrounds them."""

from __future__ import annotations

import pytest

from common.ops.operation import Implementation, Operation


def run_references(monkeypatch: pytest.MonkeyPatch, *operations: Operation) -> None:
    """Let every implementation of ``operations`` run the reference, on every device, until the end of the test."""
    for operation in operations:
        for name in operation.fast:
            monkeypatch.setitem(operation.fast, name, Implementation(operation.reference))
