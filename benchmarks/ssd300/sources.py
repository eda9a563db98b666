"""Where COCO 2017 and the backbone come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.ssd300.raw import ANNOTATIONS_ZIP, BACKBONES, SPLITS, annotations_name
from common.data.download import RemoteFile, check_or_download
from common.data.manifest import digest
from common.errors import DataError

COCO = "http://images.cocodataset.org"
LICENCE = "annotations CC BY 4.0, pictures under their owners' licences: https://cocodataset.org/#termsofuse"
ANNOTATIONS = RemoteFile(
    ANNOTATIONS_ZIP,
    f"{COCO}/annotations/{ANNOTATIONS_ZIP}",
    LICENCE,
    252_907_541,
    "md5:f4bbac642086de4f52a3fdda2de5fa2c",
)
PICTURES = {
    "train": RemoteFile(
        "train2017.zip", f"{COCO}/zips/train2017.zip", LICENCE, 19_336_861_798, "md5:cced6f7f71b7629ddf16f17bbcfab6b2"
    ),
    "val": RemoteFile(
        "val2017.zip", f"{COCO}/zips/val2017.zip", LICENCE, 815_585_330, "md5:442b8da7639aecaf257c1dceb8ba8c80"
    ),
}
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
    wanted = []
    if all((raw_dir / annotations_name(split)).is_file() for split in SPLITS):
        yield f"{raw_dir / 'annotations'}: there, unpacked"
    else:
        wanted.append(ANNOTATIONS)
    for split, name in SPLITS.items():
        if (raw_dir / name).is_dir():
            yield f"{raw_dir / name}: there, unpacked"
        else:
            wanted.append(PICTURES[split])
    for file in wanted:
        (path,) = check_or_download([file], raw_dir)
        yield f"{path}: as expected"
    yield f"{_backbone(raw_dir)}: as expected"


def _backbone(raw_dir: Path) -> Path:
    """The backbone, whose name ends with the first digits of its SHA-256."""
    (path,) = check_or_download([BACKBONE], raw_dir)
    expected, found = path.stem.rpartition("-")[2], digest(path, "sha256")
    if not found.startswith(expected):
        raise DataError(f"{path}: SHA-256 {found} does not begin with {expected}: delete it and fetch it again")
    return path
