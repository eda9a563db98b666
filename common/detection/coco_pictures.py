"""Prepared pictures of COCO: JPEG records, in the order of the annotation columns."""

from __future__ import annotations

from pathlib import Path

from common.data.manifest import NAME as MANIFEST
from common.detection.annotations import Annotations
from common.errors import DataError
from common.formats.jpeg import REMEDY
from common.formats.recordio import ImageRecord, RecordReader
from common.vision.pictures import Pictures

SPLITS = {"train": "train_samples", "val": "eval_samples"}
"""Split to the name of its number of pictures in the manifest."""


class CocoPictures(Pictures):
    """Pictures of a split, by index.

    Args:
        annotations: ids and sizes of the pictures, in the order of the records.
        benchmark: benchmark whose commands prepare and check the data, for messages.

    Raises:
        DataError: the records are missing, damaged, or differ in number from the annotations.
    """

    def __init__(self, path: Path, annotations: Annotations, benchmark: str) -> None:
        self.annotations, self.path = annotations, path
        self._records = RecordReader(path)
        if len(self._records) != len(self):
            have, wanted = len(self._records), len(self)
            self._records.close()
            raise DataError(
                f"{path} has {have} records where {MANIFEST} says {wanted}; run '{prepare_command(benchmark)}'"
            )

    def __len__(self) -> int:
        return len(self.annotations.picture_id)

    def record(self, index: int) -> ImageRecord:
        """Return the encoded picture; raise :class:`DataError` if the record is damaged or has another picture."""
        record = self._records.image(index)
        if record.record_id != self.annotations.picture_id[index]:
            raise DataError(
                f"{self._records.describe(index)}: holds picture {record.record_id}, its boxes are those of picture "
                f"{self.annotations.picture_id[index]}; {REMEDY}"
            )
        return record

    def size(self, index: int) -> tuple[int, int]:
        """Return width and height, px."""
        return int(self.annotations.picture_width[index]), int(self.annotations.picture_height[index])

    def describe(self, index: int) -> str:
        """Return a description of the picture, for messages."""
        return f"{self.path}: picture {self.annotations.picture_id[index]}"

    def close(self) -> None:
        """Close the records."""
        self._records.close()


def prepare_command(benchmark: str) -> str:
    """Return the command that prepares the data, for messages."""
    return f"mlperf-suite prepare benchmark={benchmark} --raw-dir RAW --data-dir DATA"
