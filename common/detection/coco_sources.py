"""Where COCO 2017 comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.data.download import RemoteFile, check_or_download
from common.detection.coco_raw import ANNOTATIONS_ZIP, SPLITS, annotations_name

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


def download_coco(raw_dir: Path) -> Iterator[str]:
    """Fetch COCO's archives; what is unpacked already is not fetched again.

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
