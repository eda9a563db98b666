"""Small data sets that several tests read."""

from pathlib import Path

import pytest
from small_coco import SYNTHETIC

from benchmarks.maskrcnn.prepare import prepare
from benchmarks.maskrcnn.synthetic import generate


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw: 16 training pictures, two of them not to be used, and 6 for validation."""
    raw = tmp_path_factory.mktemp("drawn") / "raw"
    generate(raw, SYNTHETIC)
    return raw


@pytest.fixture(scope="session")
def prepared(drawn: Path) -> Path:
    """The prepared data of :func:`drawn`; the backbone is in ``data-assets`` beside them."""
    data = drawn.parent / "data"
    prepare(drawn, data, workers=2)
    return data
