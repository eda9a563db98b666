"""Raw data: encodings in one of the two published forms, in the folders of MLCommons' downloader or others.

- ``cc12m_preprocessed/``, ``coco_preprocessed/``: the data sets for training and validation, as arrow files or tars;
- ``empty_encodings/``: the encodings of the empty caption.

Tars may also be in the folders ``train`` and ``val``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.flux1.encodings import EMPTY, SPLITS
from common.data.manifest import digest
from common.data.raw_layout import find_file, fingerprint_of
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import saved_dataset
from common.formats.raw_files import listed

FOLDERS = {"train": ("cc12m_preprocessed", "train"), "eval": ("coco_preprocessed", "val")}
"""Folder names of each split: that of MLCommons' downloader, and that of NVIDIA's tars."""
EMPTY_FOLDER = "empty_encodings"
TARS, TAR = "shard_*.tar", "shard_{:06d}.tar"


@dataclass(frozen=True)
class RawEncodings:
    """Published encodings.

    Attributes:
        files: files of each split, in order.
        empty: folder with the encodings of the empty caption.
        synthetic: description of synthetic data; None for real data.
    """

    files: dict[str, list[Path]]
    empty: Path
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return a SHA-256 over names and sizes of the files, and the content of the small ones."""
        small = "".join(digest(self.empty / name, "sha256") for name in EMPTY.values())
        files = [(split, path.name, path.stat().st_size) for split, paths in self.files.items() for path in paths]
        return fingerprint_of(files, small.encode())


def open_raw(raw_dir: Path) -> RawEncodings:
    """Find the published encodings in ``raw_dir`` without reading samples.

    Raises:
        DataError: the folder, a split, one of its files or the encodings of the empty caption are missing.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download the data there or generate synthetic data")
    files = {split: _files_of(raw_dir, split) for split in SPLITS}
    empty = find_file(raw_dir, f"{EMPTY_FOLDER}/{EMPTY['t5']}", EMPTY["t5"])
    for name in EMPTY.values():
        if empty is None or not (empty.parent / name).is_file():
            raise DataError(f"{raw_dir / EMPTY_FOLDER / name} is missing: training needs it for dropped captions")
    assert empty is not None
    first = [paths[0] for paths in files.values()]
    return RawEncodings(files, empty.parent, description_of(raw_dir, empty, *first))


def _files_of(raw_dir: Path, split: str) -> list[Path]:
    """Return the files of a split, in order.

    Raises:
        DataError: the split is missing or incomplete, or a tar has a foreign name.
    """
    official = FOLDERS[split][0]
    states = [f"{folder}/{saved_dataset.STATE}" for folder in FOLDERS[split]]
    found = find_file(raw_dir, *states, *(f"{folder}/{TARS}" for folder in FOLDERS[split]))
    if found is None:
        raise DataError(
            f"{raw_dir / official} has neither {saved_dataset.STATE} nor {TARS}; 'mlperf-suite download "
            "benchmark=flux1' fetches it"
        )
    if found.suffix == ".tar":
        tars = listed(found.parent, TARS)
        for number, path in enumerate(tars):
            if path.name != (wanted := TAR.format(number)):
                raise DataError(f"{found.parent} has {path.name} where {wanted} belongs: a tar is missing or foreign")
        return tars
    return saved_dataset.shards_of(found.parent)
