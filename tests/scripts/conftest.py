"""The Python interpreter that scripts call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forking_python import forking_python


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[Path]:
    """The program that scripts call instead of Python, unless a test names another."""
    with forking_python() as program, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLPERF_SUITE_PYTHON", str(program))
        yield program
