"""Where COCO 2017 and the backbone come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.data.download import RemoteFile, check_or_download
from common.detection.coco_sources import download_coco

BACKBONE = RemoteFile(
    "R-50.pkl",
    "https://dl.fbaipublicfiles.com/detectron/ImageNetPretrained/MSRA/R-50.pkl",
    "MSRA's ResNet-50 as Detectron's model zoo has it, CC BY-SA 3.0",
)
"""Published without a checksum."""


def download(raw_dir: Path) -> Iterator[str]:
    """Fetch COCO's archives and the backbone; what is unpacked already is not fetched again.

    Yields:
        A line for each.

    Raises:
        DataError: a transfer failed (the command continues it), or a file is not what was published.
    """
    yield from download_coco(raw_dir)
    (path,) = check_or_download([BACKBONE], raw_dir)
    yield f"{path}: there; nobody has published a checksum of it"
