"""Whether optional libraries are there, told without importing them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.ops.libraries import missing, no_transformer_engine

UNIMPORTABLE = 'raise AssertionError("imported")'


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, and no other."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    return tmp_path


def test_a_package_is_missing_until_it_is_installed(site: Path) -> None:
    assert missing("some-package") == "some-package is not installed"
    folder = site / "some_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    assert missing("some-package") is None


@pytest.mark.parametrize("place", ["transformer_engine/wheel_lib", "transformer_engine", "."])
def test_transformer_engine_needs_its_extension_in_one_of_three_places(site: Path, place: str) -> None:
    assert no_transformer_engine() == "transformer-engine is not installed"
    package = site / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(UNIMPORTABLE)
    assert "without its PyTorch extension" in str(no_transformer_engine())
    (site / place).mkdir(exist_ok=True)
    (site / place / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert no_transformer_engine() is None
