"""What is fetched, and what is there already; the network is a dictionary of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.ssd300 import sources
from common.data import download as downloads
from common.detection import coco_sources
from common.errors import DataError

SHA256 = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were fetched; every file holds the same bytes, whose checksums are expected."""
    names: list[str] = []

    def fetch(file: downloads.RemoteFile, path: Path) -> None:
        names.append(file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"weights")

    monkeypatch.setattr(downloads, "fetch", fetch)
    return names


def test_archives_and_backbone_are_fetched(fetched, tmp_path, monkeypatch):
    backbone = downloads.RemoteFile(f"resnet34-{SHA256[:8]}.pth", "http://x", "")
    monkeypatch.setattr(sources, "BACKBONE", backbone)
    lines = list(sources.download(tmp_path))
    assert fetched == ["annotations_trainval2017.zip", "train2017.zip", "val2017.zip", backbone.name]
    assert len(lines) == 4


def test_what_is_unpacked_is_not_fetched_again(fetched, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BACKBONE", downloads.RemoteFile(f"resnet34-{SHA256[:8]}.pth", "http://x", ""))
    (tmp_path / "train2017").mkdir()
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / "annotations" / f"instances_{split}2017.json").write_text("{}")
    list(sources.download(tmp_path))
    assert fetched == ["val2017.zip", f"resnet34-{SHA256[:8]}.pth"]


def test_another_backbone_than_its_name_says_is_refused(fetched, tmp_path):
    with pytest.raises(DataError, match="does not begin with 333f7ec4"):
        list(sources.download(tmp_path))


def test_checksums_and_addresses_are_the_published_ones():
    files = [coco_sources.ANNOTATIONS, *coco_sources.PICTURES.values()]
    assert [file.checksum for file in files] == [
        "md5:f4bbac642086de4f52a3fdda2de5fa2c",
        "md5:cced6f7f71b7629ddf16f17bbcfab6b2",
        "md5:442b8da7639aecaf257c1dceb8ba8c80",
    ]
    assert sources.BACKBONE.url == "https://download.pytorch.org/models/resnet34-333f7ec4.pth"
