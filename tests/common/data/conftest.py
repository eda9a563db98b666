"""Fixtures for downloads: a client that soon gives up, what it reports, and the command that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.data.download import Client
from common.data.fetching import Download
from common.data.http import Limits
from common.data.sources import Sources, SourceSet
from tests.common.data.remote_sets import sources_of


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


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "raw"


@pytest.fixture
def run(client: Client, raw: Path) -> Any:
    """A function that downloads to ``raw`` and returns the lines that the command prints."""

    def download(*sets: SourceSet | Sources, check: bool = False, chosen: tuple[str, ...] = ()) -> list[str]:
        sources = sets[0] if isinstance(sets[0], Sources) else sources_of(*sets)  # type: ignore[arg-type]
        return list(Download(sources, raw, 2, check, client).run(chosen))

    return download
