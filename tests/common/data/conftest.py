"""Fixtures for downloads: a client that soon gives up, and what it reports."""

from __future__ import annotations

import pytest

from common.data.download import Client
from common.data.http import Limits


@pytest.fixture
def lines() -> list[str]:
    """Lines that ``client`` has reported."""
    return []


@pytest.fixture
def client(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client that uses no proxy of this machine, and waits for nothing between two attempts."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return Client(Limits(tries=2, unreachable_tries=2, delay_s=0, timeout_s=20), lines.append)
