"""Raw data: encodings in one of the two published forms, in the folders of MLCommons' downloader or others.

- ``cc12m_preprocessed/``, ``coco_preprocessed/``: the data sets for training and validation, as arrow files or tars;
- ``empty_encodings/``: the encodings of the empty caption.

Tars may also be in the folders ``train`` and ``val``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.flux1.encodings import EMPTY, SPLITS
from common.data.manifest import digest
from common.data.raw_layout import RawSplits, find_file
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats.array_shards import PATTERNS, shards_of

FOLDERS = {"train": ("cc12m_preprocessed", "train"), "eval": ("coco_preprocessed", "val")}
"""Folder names of each split: that of MLCommons' downloader, and that of NVIDIA's tars."""
EMPTY_FOLDER = "empty_encodings"


@dataclass(frozen=True, kw_only=True)
class RawEncodings(RawSplits):
    """Published encodings; ``content`` has the checksums of those of the empty caption.

    Attributes:
        empty: folder with the encodings of the empty caption.
    """

    empty: Path


def open_raw(raw_dir: Path) -> RawEncodings:
    """Find the published encodings in ``raw_dir`` without reading samples.

    Raises:
        DataError: the folder, a split, one of its files or the encodings of the empty caption are missing, or a tar has
            a foreign name.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download the data there or generate synthetic data")
    splits = {}
    for split in SPLITS:
        found = find_file(raw_dir, *(f"{folder}/{pattern}" for pattern in PATTERNS for folder in FOLDERS[split]))
        if found is None:
            raise DataError(
                f"{raw_dir / FOLDERS[split][0]} has neither {' nor '.join(PATTERNS)}; 'mlperf-suite download "
                "benchmark=flux1' fetches it"
            )
        splits[split] = shards_of(found)
    empty = find_file(raw_dir, f"{EMPTY_FOLDER}/{EMPTY['t5']}", EMPTY["t5"])
    for name in EMPTY.values():
        if empty is None or not (empty.parent / name).is_file():
            raise DataError(f"{raw_dir / EMPTY_FOLDER / name} is missing: training needs it for dropped captions")
    assert empty is not None
    folder, firsts = empty.parent, [paths[0] for paths in splits.values()]
    small = "".join(digest(folder / name, "sha256") for name in EMPTY.values())
    synthetic = description_of(raw_dir, empty, *firsts)
    return RawEncodings(splits=splits, synthetic=synthetic, content=small.encode(), empty=folder)
