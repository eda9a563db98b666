"""Where COCO 2017 and the backbone come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.data.download import RemoteFile, check_or_download
from common.data.manifest import digest
from common.detection.coco_sources import download_coco
from common.errors import DataError

BACKBONES = ("resnet34-333f7ec4.pth", "backbone.pth")
"""Names of the file that the backbone starts from: torchvision's, and a stand-in's."""
BACKBONE = RemoteFile(
    BACKBONES[0], f"https://download.pytorch.org/models/{BACKBONES[0]}", "BSD 3-Clause, torchvision's"
)


def download(raw_dir: Path) -> Iterator[str]:
    """Fetch COCO's archives and the backbone; what is unpacked already is not fetched again.

    Yields:
        A line for each.

    Raises:
        DataError: a transfer failed (the command continues it), or a file is not what was published.
    """
    yield from download_coco(raw_dir)
    yield f"{_backbone(raw_dir)}: as expected"


def _backbone(raw_dir: Path) -> Path:
    """The backbone, whose name ends with the first digits of its SHA-256."""
    (path,) = check_or_download([BACKBONE], raw_dir)
    expected, found = path.stem.rpartition("-")[2], digest(path, "sha256")
    if not found.startswith(expected):
        raise DataError(f"{path}: SHA-256 {found} does not begin with {expected}: delete it and fetch it again")
    return path
