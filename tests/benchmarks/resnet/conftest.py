"""Small data sets that several tests read."""

from pathlib import Path

import pytest

from benchmarks.resnet.prepare import prepare
from benchmarks.resnet.synthetic import SyntheticImages, generate


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared: 61 training and 23 validation digits."""
    root = tmp_path_factory.mktemp("digits")
    generate(root / "raw", SyntheticImages(train=61, val=23))
    prepare(root / "raw", root / "data", workers=2)
    return root / "data"
