"""Test scripts/sample_docstrings.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SOURCE = '''
class Public:
    """A class."""

    def method(self, rows: int = 1) -> int:
        """Return rows.

        More.
        """

    def _private(self): "No sample."

def _hidden(): "No sample."

def bare(): ...
'''


def sample(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "sample_docstrings.py"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_public_docstrings_are_shown_with_place_and_signature(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.py").write_text(SOURCE)
    (tmp_path / "benchmarks").mkdir()
    shown = sample("--root", str(tmp_path), "--count", "2")
    assert "common/a.py:2\nclass Public\n\n    A class.\n" in shown
    assert "def Public.method(self, rows: int=1) -> int\n\n    Return rows.\n\n    More.\n" in shown
    assert "No sample" not in shown


def test_a_seed_always_gives_the_same_sample() -> None:
    assert sample("--seed", "2", "--count", "3") == sample("--seed", "2", "--count", "3") != sample("--count", "3")
