"""Small data sets that several tests read."""

from pathlib import Path

import pytest
from small_ssd300 import SYNTHETIC

from benchmarks.ssd300.prepare import prepare
from benchmarks.ssd300.synthetic import generate


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw: 12 training pictures, one without a box, and 5 for validation."""
    raw = tmp_path_factory.mktemp("drawn") / "raw"
    generate(raw, SYNTHETIC)
    return raw


@pytest.fixture(scope="session")
def prepared(drawn: Path) -> Path:
    """The prepared data of :func:`drawn`."""
    data = drawn.parent / "data"
    prepare(drawn, data, workers=2)
    return data
