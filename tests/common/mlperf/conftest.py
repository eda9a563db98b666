"""Fixtures of the tests of logs and rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from handwritten_logs import Line, encode


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Write lines as a log under a name, and return its path."""

    def write(lines: list[Line], name: str = "result_0.txt") -> Path:
        path = tmp_path / name
        path.write_text("".join(encode(line, number) for number, line in enumerate(lines)))
        return path

    return write
