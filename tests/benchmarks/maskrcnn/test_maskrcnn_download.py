"""What is fetched; the network is a dictionary of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.maskrcnn.sources import download
from common.data import download as downloads
from common.errors import DataError


def test_archives_and_backbone_are_fetched_unless_they_are_there(tmp_path, monkeypatch: pytest.MonkeyPatch):
    fetched: list[str | None] = []

    def fetch(file: downloads.RemoteFile, path: Path) -> None:
        fetched.append(file.url)
        path.write_bytes(b"bytes")

    monkeypatch.setattr(downloads, "fetch", fetch)
    (tmp_path / "val2017").mkdir()
    lines = list(download(tmp_path))
    assert fetched == [
        "http://images.cocodataset.org/annotations/annotations_trainval2017.zip",
        "http://images.cocodataset.org/zips/train2017.zip",
        "https://dl.fbaipublicfiles.com/detectron/ImageNetPretrained/MSRA/R-50.pkl",
    ]
    assert lines[0] == f"{tmp_path / 'val2017'}: there, unpacked"
    assert lines[-1] == f"{tmp_path / 'R-50.pkl'}: there; nobody has published a checksum of it"
    with pytest.raises(DataError, match=r"annotations_trainval2017.zip has 5 bytes instead of 252907541"):
        list(download(tmp_path))
    assert len(fetched) == 3
