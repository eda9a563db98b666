"""ImageNet's raw layouts: the original tars, or folders ``train/<synset>/*.JPEG`` and ``val/<synset>/*.JPEG``.

In both layouts a picture is a byte range of a file. Pictures are read from there; nothing is unpacked. A label is the
index of the picture's synset in the sorted list of all synsets (0 to 999 for ImageNet).
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.data.synthetic import marker_of
from common.errors import DataError
from common.formats.raw_files import add_member, data_members, is_data, listed
from common.untrusted.archives import named_damage, tar_members
from common.untrusted.regular_file import open_regular, read_text

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT_TAR = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
META = "ILSVRC2012_devkit_t12/data/meta.mat"
SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclass(frozen=True, slots=True)
class RawPicture:
    """One picture: ``size`` bytes at ``offset`` of ``path``, with its label. Messages call it ``synset/name``."""

    path: Path
    offset: int
    size: int
    synset: str
    name: str
    label: int

    def read(self) -> bytes:
        """Return the encoded picture.

        Raises:
            DataError: the file ends inside the picture.
        """
        with open(self.path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) < self.size:
            raise DataError(f"{self.path}: {self.synset}/{self.name} at byte {self.offset} is truncated")
        return data


@dataclass(frozen=True)
class RawData:
    """Pictures of both splits, each sorted by synset and name.

    Attributes:
        synthetic: text of the marker file of synthetic data, or None for ImageNet.
    """

    train: list[RawPicture]
    val: list[RawPicture]
    synsets: list[str]
    synthetic: str | None

    def fingerprint(self) -> str:
        """Return the SHA-256 over names, sizes and labels, which does not depend on the layout."""
        digest = hashlib.sha256()
        for split in (self.train, self.val):
            for picture in split:
                digest.update(f"{picture.synset}/{picture.name}\t{picture.size}\t{picture.label}\n".encode())
            digest.update(b"\n")
        return digest.hexdigest()


def open_raw(raw_dir: Path) -> RawData:
    """Index ``raw_dir``. If it has both tars and folders, the tars are used.

    Raises:
        DataError: the folder, a split or the validation labels are missing, or the splits have different synsets.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; put ImageNet's tars there or generate synthetic data")
    found = {
        "train": _from_tar_of_tars(raw_dir / TRAIN_TAR) or _from_folders(raw_dir / "train"),
        "val": _from_val_tar(raw_dir) or _from_folders(raw_dir / "val"),
    }
    for split, pictures in found.items():
        if not pictures:
            tars = TRAIN_TAR if split == "train" else f"{VAL_TAR} with {DEVKIT_TAR}"
            raise DataError(f"{raw_dir} holds no {split} pictures: neither {tars} nor {split}/<synset>/*.JPEG")
    synsets = sorted({picture[3] for picture in found["train"]})
    unknown = sorted({picture[3] for picture in found["val"]} - set(synsets))
    if unknown:
        raise DataError(f"{raw_dir}: val has pictures of {unknown[0]}, a class without training pictures")
    label = {synset: index for index, synset in enumerate(synsets)}
    train, val = (
        [RawPicture(*fields, label[fields[3]]) for fields in sorted(found[split], key=lambda f: (f[3], f[4]))]
        for split in ("train", "val")
    )
    marker = marker_of(raw_dir)
    synthetic = None if marker is None else read_text(marker).strip()
    return RawData(train, val, synsets, synthetic)


_Fields = tuple[Path, int, int, str, str]  # path, offset, size, synset, name


def _from_folders(root: Path) -> list[_Fields]:
    found: list[_Fields] = []
    if not root.is_dir():
        return found
    for synset in (path for path in listed(root) if path.is_dir()):
        for entry in os.scandir(synset):  # stat() of more than a million paths would take several times as long
            if entry.name.lower().endswith(SUFFIXES) and is_data(entry.name):
                found.append((Path(entry.path), 0, entry.stat().st_size, synset.name, entry.name))
    return found


def _from_tar_of_tars(path: Path) -> list[_Fields]:
    found: list[_Fields] = []
    if not path.is_file():
        return found
    with open(path, "rb") as outer, open(path, "rb") as inner:
        for class_tar, offset, _ in data_members(outer, path):
            synset = class_tar.removesuffix(".tar")
            found += [(path, at, size, synset, name) for name, at, size in data_members(inner, path, offset)]
    return found


def _from_val_tar(raw_dir: Path) -> list[_Fields]:
    path, devkit = raw_dir / VAL_TAR, raw_dir / DEVKIT_TAR
    if not path.is_file():
        return []
    if not devkit.is_file():
        raise DataError(f"{path} has no labels of its own: {devkit} is missing")
    with open(path, "rb") as file:
        pictures = sorted(data_members(file, path))
    synsets = validation_synsets(devkit)
    if len(synsets) != len(pictures):
        raise DataError(f"{devkit} labels {len(synsets)} pictures, {path} holds {len(pictures)}")
    return [(path, at, size, synset, name) for (name, at, size), synset in zip(pictures, synsets, strict=True)]


MATLAB_DAMAGE = (ValueError, LookupError, TypeError, OSError, MemoryError, NotImplementedError, zlib.error)
"""Exceptions that SciPy raises when it reads a damaged table."""
DEVKIT_BYTES, MEMBER_BYTES = 2**28, 2**20
"""Size limits in bytes: of the uncompressed kit (about 4 MB), and of each file read from it (below 0.4 MB)."""


def validation_synsets(devkit: Path) -> list[str]:
    """Return the synset of every validation picture, in the order of picture numbers, from the development kit.

    Raises:
        DataError: the kit is damaged or lacks its ground truth or its table of classes.
    """
    from scipy.io import loadmat

    found: dict[str, bytes] = {}
    with open_regular(devkit) as file, named_damage(f"{devkit} is damaged"):
        for tar, member in tar_members(file, f"{devkit} is damaged", "r|gz", most=DEVKIT_BYTES):
            if member.name in (GROUND_TRUTH, META) and member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                found[member.name] = content.read(MEMBER_BYTES + 1)
    if found.keys() != {GROUND_TRUTH, META} or max(map(len, found.values())) > MEMBER_BYTES:
        raise DataError(f"{devkit} is damaged or no ILSVRC2012 development kit: it lacks {GROUND_TRUTH} or {META}")
    truth, meta = found[GROUND_TRUTH], found[META]
    try:
        table = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    except MATLAB_DAMAGE as error:
        raise DataError(f"{devkit}: {META} is damaged: {type(error).__name__}: {error}") from error
    try:
        return [synset_of[int(line)] for line in truth.split()]
    except (KeyError, ValueError) as error:
        raise DataError(f"{devkit}: ground truth names {error}, which the table of classes does not have") from error


def write_folders(raw_dir: Path, split: str, pictures: Iterable[tuple[str, str, bytes]]) -> int:
    """Write ``(synset, name, data)`` as folders and return the total bytes of the pictures."""
    total = 0
    for synset, name, data in pictures:
        folder = raw_dir / split / synset
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        total += len(data)
    return total


def write_train_tar(raw_dir: Path, pictures: Iterable[tuple[str, str, bytes]]) -> int:
    """Write ``(synset, name, data)`` as ImageNet's tar of one tar per class and return the pictures' bytes."""
    classes: dict[str, list[tuple[str, bytes]]] = {}
    for synset, name, data in pictures:
        classes.setdefault(synset, []).append((name, data))
    with tarfile.open(raw_dir / TRAIN_TAR, "w") as outer:
        for synset, members in sorted(classes.items()):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as inner:
                for name, data in members:
                    add_member(inner, name, data)
            add_member(outer, f"{synset}.tar", buffer.getvalue())
    return sum(len(data) for members in classes.values() for _, data in members)


def write_val_tar(raw_dir: Path, pictures: Iterable[tuple[str, str, bytes]], synsets: list[str]) -> int:
    """Write the validation tar and the development kit with its labels; return the pictures' bytes."""
    import numpy as np
    from scipy.io import savemat

    # As in ImageNet, the ids do not follow the order of the synsets.
    ids = {synset: index + 1 for index, synset in enumerate(reversed(synsets))}
    total, truth = 0, []
    with tarfile.open(raw_dir / VAL_TAR, "w") as tar:
        for synset, name, data in sorted(pictures, key=lambda picture: picture[1]):
            add_member(tar, name, data)
            truth.append(f"{ids[synset]}\n")
            total += len(data)
    table = np.array(
        [(ids[synset], synset, synset, 0) for synset in synsets],
        dtype=[("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O"), ("num_children", "i4")],
    )
    meta = io.BytesIO()
    savemat(meta, {"synsets": table})
    with tarfile.open(raw_dir / DEVKIT_TAR, "w:gz") as tar:
        add_member(tar, GROUND_TRUTH, "".join(truth).encode())
        add_member(tar, META, meta.getvalue())
    return total
