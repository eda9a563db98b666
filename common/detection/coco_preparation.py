"""Preparation of COCO 2017 as picture records and annotation columns, shared by several benchmarks.

The output is ``train.rec``, ``train.idx``, ``val.rec`` and ``val.idx`` with the unchanged JPEG bytes of the pictures,
by rising id; ``train/*.npy`` and ``val/*.npy`` with the annotations in the same order; and ``manifest.json``. The
backbone goes to a separate folder, because a run may read it before ``run_start``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data import manifest, preparation
from common.data.commands import AssetsDir, DataCommands, Trust
from common.data.manifest import Manifest
from common.data.preparation import assets_of, link_or_copy, preparing
from common.data.published import Published
from common.data.synthetic import MARKER
from common.detection.annotations import Annotations, read_coco
from common.detection.coco_pictures import SPLITS, prepare_command
from common.detection.coco_raw import RawData, RawPictures, annotations_name, open_raw
from common.errors import DataError
from common.formats.jpeg import checked_size
from common.formats.recordio import ImageRecord, pack_image
from common.vision import record_files

COCO_COUNTS = {"train_samples": 117_266, "eval_samples": 5_000, "classes": 80}
PUBLISHED = Published(COCO_COUNTS)


@dataclass(frozen=True)
class CocoPreparation:
    """Description of how one benchmark prepares COCO.

    Attributes:
        format: format of the prepared data, for the manifest.
        backbones: accepted file names of the pretrained backbone; the first is the published name.
        segmentations: whether the annotations include segmentations.
        select: maps a split (``train`` or ``val``) and its annotations to the pictures and boxes to keep; raises
            :class:`DataError` if the benchmark cannot use the data.
        counts: maps a split and its selected annotations to additional counts for the manifest.
    """

    benchmark: str
    format: str
    backbones: tuple[str, ...]
    segmentations: bool
    select: Callable[[str, Annotations], Annotations]
    counts: Callable[[str, Annotations], dict[str, int]]

    @property
    def command(self) -> str:
        """The command, for messages."""
        return prepare_command(self.benchmark)

    def prepare(
        self, raw_dir: Path, data_dir: Path, assets_dir: AssetsDir = None, workers: int = 4, trust: Trust = False
    ) -> Manifest:
        """Write the prepared data set and copy the backbone. Finished parts are skipped, interrupted ones continued.

        Args:
            assets_dir: output folder for the backbone.

        Raises:
            DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` or
                ``assets_dir`` have data from another source; or another process prepares now.
        """
        source = open_raw(raw_dir, self.benchmark, self.backbones)
        wanted = {"fingerprint": source.fingerprint(), **preparation.decoding(trust)}
        with preparing(data_dir, self.format, self.command, wanted, PUBLISHED, source.synthetic) as job:
            _place_backbone(source, assets_dir or assets_of(data_dir))
            if job.found is not None:
                return job.found
            splits = {split: self._selected(source, split, data_dir) for split in SPLITS}
            counts = self._counts(source, splits)
            files = _write(source, splits, data_dir, wanted, workers, trust)
            made = job.finish(manifest.describe_files(data_dir, files), counts, "COCO 2017")
            (data_dir / record_files.STATE).unlink()
            return made

    def commands(self, generate: Callable[..., str], prepared: str) -> DataCommands:
        """Return the data commands. ``prepared`` describes the contents of a data folder."""
        return DataCommands(
            self.benchmark,
            raw="COCO's archives, or what is in them",
            prepared=prepared,
            real="COCO 2017",
            generate=generate,
            prepare=self.prepare,
            verify=manifest.verification(self.format, self.command),
            assets=(self.backbones,),
            published=PUBLISHED,
        )

    def _selected(self, source: RawData, split: str, data_dir: Path) -> Annotations:
        """Return the annotations of a split that are kept."""
        path = source.folder / annotations_name(split)
        if path.is_file():
            found = read_coco(path, names=True, segmentations=self.segmentations)
        else:
            unpacked = data_dir / f"{path.name}.partial"
            with source.annotations(split) as packed, open(unpacked, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            found = read_coco(unpacked, names=True, segmentations=self.segmentations)
            unpacked.unlink()
        selected = self.select(split, found)
        _require_pictures(source.pictures[split], selected, self.benchmark)
        return selected

    def _counts(self, source: RawData, splits: dict[str, Annotations]) -> dict[str, int]:
        """Return the ``counts`` of the manifest: pictures of each split, classes, and further ones of the benchmark.

        Raises:
            DataError: the splits have different categories, or data without a marker differ from COCO 2017.
        """
        train, val = splits["train"], splits["val"]
        if train.class_id.tolist() != val.class_id.tolist():
            raise DataError(f"{source.folder}: the categories of training and validation differ")
        counts = {name: len(splits[split].picture_id) for split, name in SPLITS.items()}
        counts["classes"] = len(train.class_id)
        if source.synthetic is None and counts != COCO_COUNTS:
            raise DataError(
                f"{source.folder} holds {counts} where COCO 2017 has {COCO_COUNTS}; for other data put a file {MARKER} "
                "(a JSON object) into the folder that says what they are"
            )
        for split, found in splits.items():
            counts |= self.counts(split, found)
        return counts


def with_pictures(annotations: Annotations, keep_P: NDArray[np.bool_] | None = None) -> Annotations:
    """Return the annotations with pictures sorted by id, only those in ``keep_P`` if given. All boxes stay."""
    order = np.argsort(annotations.picture_id)
    if keep_P is not None:
        order = order[keep_P[order]]
    assert annotations.picture_name is not None
    return dataclasses.replace(
        annotations,
        picture_id=annotations.picture_id[order],
        picture_height=annotations.picture_height[order],
        picture_width=annotations.picture_width[order],
        picture_name=annotations.picture_name[order],
    )


def _place_backbone(source: RawData, assets_dir: Path) -> None:
    if source.backbone is not None:
        remedy = f"delete {assets_dir} or name another --assets-dir"
        link_or_copy(source.backbone, assets_dir / source.backbone.name, remedy)


def _require_pictures(pictures: RawPictures, wanted: Annotations, benchmark: str) -> None:
    assert wanted.picture_name is not None
    names = [name.decode() for name in wanted.picture_name]
    if missing := [name for name in names if name not in pictures.sizes]:
        raise DataError(
            f"{pictures.path} lacks {len(missing)} of {len(names)} pictures, such as {', '.join(missing[:3])}; "
            f"'mlperf-suite download benchmark={benchmark}' fetches them"
        )


def _write(
    source: RawData, splits: dict[str, Annotations], data_dir: Path, wanted: dict[str, str], workers: int, trust: bool
) -> list[str]:
    """Write records and columns; return their names relative to ``data_dir``."""
    records = [f"{split}.{suffix}" for split in SPLITS for suffix in ("rec", "idx")]
    sizes = (size for split in SPLITS for size in source.pictures[split].sizes.values())
    record_files.begin(data_dir, records, wanted, sizes)
    columns = []
    for split, found in splits.items():
        payload = partial(_payload, source.pictures[split], found, trust)
        record_files.write(data_dir / f"{split}.rec", range(len(found.picture_id)), payload, workers)
        columns += dataclasses.replace(found, picture_name=None).write(data_dir / split)
    return [*records, *(path.relative_to(data_dir).as_posix() for path in columns)]


def _payload(pictures: RawPictures, wanted: Annotations, trust: bool, row: int) -> bytes:
    assert wanted.picture_name is not None
    name = wanted.picture_name[row].decode()
    data = pictures.read(name)
    try:
        size = checked_size(data, trust)
    except ValueError as error:
        raise DataError(f"{pictures.path}: {name} cannot be decoded: {error}; fetch the file again") from error
    expected = (int(wanted.picture_width[row]), int(wanted.picture_height[row]))
    if size != expected:
        raise DataError(f"{pictures.path}: {name} has {size} px (width, height) where the annotations say {expected}")
    return pack_image(ImageRecord(int(wanted.picture_id[row]), (0.0,), data))
