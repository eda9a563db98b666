"""COCO 2017 as published: annotations and pictures, as archives or unpacked.

- ``annotations/instances_{train,val}2017.json``, or ``annotations_trainval2017.zip`` with these files;
- ``{train,val}2017/*.jpg``, or ``{train,val}2017.zip`` with these files;
- the pretrained backbone of the benchmark.

Unpacked files take precedence. Archives are read in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from common.data.synthetic import description_of
from common.errors import DataError
from common.formats.raw_files import is_data
from common.untrusted.archives import BAD_ZIP, bounded_zip
from common.untrusted.regular_file import open_file, open_regular, read_bytes

SPLITS = {"train": "train2017", "val": "val2017"}
"""Split to the folder of its pictures; the archive has the same name with ``.zip``."""
ANNOTATIONS_ZIP = "annotations_trainval2017.zip"
PICTURE_BYTES = 2**28
"""Largest accepted picture in bytes; COCO's pictures have less than 1 MB."""
ANNOTATION_BYTES = 2**32
"""Largest accepted annotation file in bytes, uncompressed; that of the training pictures has 470 MB."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)
"""Exceptions from reading a member of a damaged archive."""


def is_picture(name: str) -> bool:
    """Return whether the file with this path below its folder, or in its archive, is a picture of a data set."""
    return name.lower().endswith((".jpg", ".jpeg", ".png")) and is_data(name)


def annotations_name(split: str) -> str:
    """Return the path of a split's annotations, in the raw folder and in the archive."""
    return f"annotations/instances_{SPLITS[split]}.json"


@dataclass(frozen=True)
class RawPictures:
    """Picture files of a split.

    Attributes:
        path: folder or archive.
        sizes: file name to size in bytes.
        remedy: how to download missing or damaged files, for messages.
    """

    path: Path
    sizes: dict[str, int]
    remedy: str
    _archive: zipfile.ZipFile | None = field(default=None, repr=False)

    def read(self, name: str) -> bytes:
        """Return the encoded picture; several threads may read at once.

        Raises:
            DataError: there is no such file, or the archive is damaged there.
        """
        try:
            if self._archive is None:
                return read_bytes(self.path / name, PICTURE_BYTES)
            with self._archive.open(f"{self.path.stem}/{name}") as member:
                content = member.read(PICTURE_BYTES + 1)
            if len(content) > PICTURE_BYTES:
                raise zipfile.BadZipFile(f"it is larger than {PICTURE_BYTES:,} bytes")
            return content
        except (DataError, OSError, KeyError, *_DAMAGED) as error:
            raise DataError(f"{self.path}: {name} cannot be read: {error}; {self.remedy}") from error


@dataclass(frozen=True)
class RawData:
    """A raw folder.

    Attributes:
        synthetic: description of synthetic data; None for COCO.
        benchmark: name of the benchmark, for messages.
        backbones: accepted file names of the pretrained backbone.
    """

    folder: Path
    synthetic: dict[str, Any] | None
    benchmark: str
    backbones: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """How to download missing or damaged files, for messages."""
        return f"'mlperf-suite download benchmark={self.benchmark}' fetches it"

    @contextlib.contextmanager
    def annotations(self, split: str) -> Iterator[IO[bytes]]:
        """Open the annotations of a split. The file is closed even if the block fails.

        Raises:
            DataError: the file is missing, or the archive is damaged.
        """
        path, archive = self.folder / annotations_name(split), self.folder / ANNOTATIONS_ZIP
        if path.is_file():
            with open_regular(path) as file:
                yield file
            return
        if not archive.is_file():
            raise DataError(f"{path} is missing, and so is {archive}; {self.remedy}")
        with self._opened(archive) as opened:
            try:
                if opened.getinfo(annotations_name(split)).file_size > ANNOTATION_BYTES:
                    raise zipfile.BadZipFile(f"it is larger than {ANNOTATION_BYTES:,} bytes")
                with opened.open(annotations_name(split)) as member:
                    yield member
            except (KeyError, *_DAMAGED) as error:
                raise DataError(
                    f"{archive}: {annotations_name(split)} cannot be read: {error}; {self.remedy}"
                ) from error

    @cached_property
    def pictures(self) -> dict[str, RawPictures]:
        """Pictures of each split; raises :class:`DataError` if both folder and archive are missing."""
        return {split: self._pictures(name) for split, name in SPLITS.items()}

    def _pictures(self, name: str) -> RawPictures:
        folder, archive = self.folder / name, self.folder / f"{name}.zip"
        if folder.is_dir():
            with os.scandir(folder) as entries:
                files = {entry.name: entry.stat().st_size for entry in entries if is_picture(entry.name)}
            return RawPictures(folder, files, self.remedy)
        if not archive.is_file():
            raise DataError(f"{folder} is missing, and so is {archive}; {self.remedy}")
        opened = self._opened(archive)
        inside = f"{name}/"
        infos = (info for info in opened.infolist() if is_picture(info.filename))
        members = {info.filename.removeprefix(inside): info.file_size for info in infos}
        return RawPictures(archive, members, self.remedy, opened)

    def _opened(self, archive: Path) -> zipfile.ZipFile:
        try:
            return bounded_zip(open_file(archive))
        except (OSError, *BAD_ZIP) as error:
            raise DataError(f"{archive} is damaged or no archive: {error}; delete it, and {self.remedy}") from error

    def fingerprint(self) -> str:
        """Return SHA-256 over the annotations and the names and sizes of all pictures; reads the annotations."""
        digest = hashlib.sha256()
        for split in SPLITS:
            with self.annotations(split) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            for name, size in sorted(self.pictures[split].sizes.items()):
                digest.update(f"{name}\t{size}\n".encode())
        return digest.hexdigest()

    @property
    def backbone(self) -> Path | None:
        """Path of the pretrained backbone; None if there is none."""
        return next((self.folder / name for name in self.backbones if (self.folder / name).is_file()), None)


def open_raw(raw_dir: Path, benchmark: str, backbones: tuple[str, ...]) -> RawData:
    """Return the raw data in ``raw_dir``, without reading them; for other arguments see :class:`RawData`.

    Raises:
        DataError: the folder is missing, or its ``SYNTHETIC`` file is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download COCO there or generate synthetic data")
    return RawData(raw_dir, description_of(raw_dir), benchmark, backbones)
