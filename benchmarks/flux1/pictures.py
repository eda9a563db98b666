"""Raw pictures and captions: the selection of the benchmark's samples, and the networks' input.

- ``cc12m-wds/cc12m-train-0000.tar`` ...: CC12M, with ``KEY.jpg`` and ``KEY.txt``; ``problematic_indices.txt`` lists
  the samples to leave out, by position in all tars. Training uses the first samples whose sides have 256 px or more;
  the shorter side is resized to 256 px, and the central square is cropped.
- ``val2014/COCO_val2014_000000000042.jpg`` ... and ``annotations/captions_val2014.json``: COCO 2014. All captions are
  shuffled. Validation uses the first caption of each picture, up to the number of samples, sorted by id. Pictures are
  resized to 256 x 256 px, and a sample's timestep is its row modulo 8.

Resizing is bicubic. Source: the README and scripts of the reference (mlcommons/training, text_to_image).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torchvision.transforms import functional

from benchmarks.flux1.encodings import BINS
from common.data.manifest import digest
from common.data.raw_layout import RawSplits, find_file
from common.data.stages import Stages
from common.data.synthetic import description_of
from common.detection.json_entries import Entries
from common.errors import DataError
from common.formats.jpeg import decode, jpeg_size
from common.formats.tar_index import decode_text, index_tar, numbered_tars
from common.untrusted.regular_file import TEXT_BYTES, open_file
from common.untrusted.strict_json import read_large_json

SIDE, BICUBIC = 256, functional.InterpolationMode.BICUBIC
SEED = 2023
"""Seed of the shuffle of COCO's captions."""
TAR, TARS, LEFT_OUT = "cc12m-train-{:04d}.tar", "cc12m-wds/cc12m-train-*.tar", "problematic_indices.txt"
ANNOTATIONS, PICTURES = "annotations/captions_val2014.json", "val2014/COCO_val2014_*.jpg"
STAGE = "sizes"
_TOGETHER = 64  # tars whose pictures are measured before the samples are counted
_MEMBERS = ("jpg", "txt")


@dataclass(frozen=True)
class Sample:
    """Position of a picture and its caption.

    Attributes:
        path: a JPEG file, or a tar.
        key: name of the sample, unique in its split.
        picture: offset and size in ``path``, bytes.
        caption: the caption, or its offset and size in ``path``.
        timestep: only of validation samples.
    """

    path: Path
    key: str
    picture: Sequence[int]
    caption: str | Sequence[int]
    timestep: int | None = None

    def read(self) -> tuple[Tensor, str]:
        """Return the networks' input: the picture (3, S, S) in fp32, from -1 to 1, and the caption.

        Raises:
            DataError: the picture or the caption is damaged.
        """
        with open(self.path, "rb") as file:
            content, caption = os.pread(file.fileno(), self.picture[1], self.picture[0]), self.caption
            if not isinstance(caption, str):
                caption = decode_text(os.pread(file.fileno(), caption[1], caption[0]), f"{self.path}: {self.key}.txt")
        try:
            picture = decode(content)
        except ValueError as error:
            raise DataError(f"{self.path}: the picture of {self.key} is no whole JPEG: {error}") from error
        square = [SIDE, SIDE]
        if self.timestep is None:
            picture = functional.center_crop(functional.resize(picture, SIDE, BICUBIC), square)
        else:
            picture = functional.resize(picture, square, BICUBIC)
        return functional.pil_to_tensor(picture).float() / 255 * 2 - 1, caption


@dataclass(frozen=True, kw_only=True)
class RawPictures(RawSplits):
    """Raw pictures: the tars of CC12M; ``content`` has the checksums of both lists.

    Attributes:
        left_out: file of the positions to leave out.
        annotations: captions of COCO.
        pictures: folder with COCO's pictures.
    """

    left_out: Path
    annotations: Path
    pictures: Path


def open_pictures(raw_dir: Path) -> RawPictures:
    """Find the raw pictures in ``raw_dir`` without reading samples.

    Raises:
        DataError: tars, pictures or a list are missing. A tar must not be missing between others, because positions
            to leave out count the samples of all tars.
    """
    found = []
    for pattern in (TARS, LEFT_OUT, ANNOTATIONS, PICTURES):
        if (path := find_file(raw_dir, pattern, pattern.rpartition("/")[2])) is None:
            raise DataError(
                f"{raw_dir / pattern} is missing: --encoders reads pictures and captions; see 'mlperf-suite download "
                "benchmark=flux1 --list'"
            )
        found.append(path)
    tar, left_out, annotations, picture = found
    return RawPictures(
        splits={"train": numbered_tars(tar.parent, TAR)},
        synthetic=description_of(raw_dir, *found),
        content=(digest(left_out, "sha256") + digest(annotations, "sha256")).encode(),
        left_out=left_out,
        annotations=annotations,
        pictures=picture.parent,
    )


def train_samples(raw: RawPictures, count: int, stages: Stages) -> list[Sample]:
    """Return the first ``count`` samples to train on, in their stored order.

    Args:
        stages: run the measurement of the pictures, once per tar.

    Raises:
        DataError: a tar or the list of positions is damaged, or there are fewer samples.
    """
    tars, left_out = raw.splits["train"], _positions(raw.left_out)
    samples: list[Sample] = []
    before = 0
    for first in range(0, len(tars), _TOGETHER):
        tasks = {path.stem: (path,) for path in tars[first : first + _TOGETHER]}
        for (path,), record in zip(tasks.values(), stages.run(STAGE, tasks, large_pictures).values(), strict=True):
            for row, broken, *sample in record["found"]:
                if before + row in left_out:
                    continue
                if broken:
                    raise DataError(f"{path}: the picture of sample {row} is no whole JPEG: {broken}")
                key, picture, caption = sample
                samples.append(Sample(path, key, picture, caption))
            before += record["samples"]
        if len(samples) >= count:
            return samples[:count]
    raise DataError(
        f"{raw.splits['train'][0].parent} has {len(samples):,} samples to train on, and {count:,} are needed"
    )


def large_pictures(path: Path) -> dict[str, Any]:
    """Return the number of samples of a tar, and those whose sides have 256 px or more.

    Returns:
        ``samples``, and ``found``, which includes broken pictures: row, why the picture is no JPEG (empty if it is
        one), key, offset and size of the picture, and those of the caption.

    Raises:
        DataError: the tar is damaged.
    """
    keys, ranges = index_tar(path, _MEMBERS)
    found: list[list[Any]] = []
    with open(path, "rb") as file:
        for row, (key, (picture, caption)) in enumerate(zip(keys, ranges.tolist(), strict=True)):
            try:
                large, broken = min(jpeg_size(os.pread(file.fileno(), picture[1], picture[0]))) >= SIDE, ""
            except ValueError as error:
                large, broken = True, str(error)
            if large:
                found.append([row, broken, key, picture, caption])
    return {"samples": len(keys), "found": found}


def eval_samples(raw: RawPictures, count: int) -> list[Sample]:
    """Return ``count`` validation samples.

    Raises:
        DataError: the annotations are damaged, a picture is missing, or there are fewer pictures.
    """
    samples = []
    for row, (picture, caption) in enumerate(selected(_annotations(raw.annotations), count)):
        path = raw.pictures / f"COCO_val2014_{picture:012d}.jpg"
        if not path.is_file():
            raise DataError(f"{path} is missing, a picture of the validation set")
        samples.append(Sample(path, f"{picture:012d}", (0, path.stat().st_size), caption, row % BINS))
    if len(samples) < count:
        raise DataError(f"{raw.annotations} has captions of {len(samples):,} pictures, and {count:,} are needed")
    return samples


def selected(annotations: Sequence[tuple[int, int, str]], count: int) -> list[tuple[int, str]]:
    """Return picture and caption of the validation samples.

    Args:
        annotations: id of the caption, id of the picture, and caption, in the order of the file.
    """
    first: dict[int, tuple[int, str]] = {}
    for row in np.random.RandomState(SEED).permutation(len(annotations)).tolist():
        number, picture, caption = annotations[row]
        first.setdefault(picture, (number, caption))
    chosen = list(itertools.islice(first.items(), count))
    chosen.sort(key=lambda entry: entry[1][0])
    return [(picture, caption.replace("\n", "").strip()) for picture, (_, caption) in chosen]


def _annotations(path: Path) -> list[tuple[int, int, str]]:
    entries = Entries.of(read_large_json(path), "annotations", path)
    columns = entries.ids("id").tolist(), entries.ids("image_id").tolist(), entries.texts("caption")
    return list(zip(*columns, strict=True))


def _positions(path: Path) -> set[int]:
    with open_file(path) as file:
        lines = file.read(TEXT_BYTES).decode("utf-8", "replace").split()
    if not all(line.isdecimal() and len(line) < 12 for line in lines):
        raise DataError(f"{path}: every line must be the position of a sample")
    return {int(line) for line in lines}
