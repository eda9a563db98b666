"""Prepared pictures of COCO: JPEG records, in the order of the annotation columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.data.manifest import NAME as MANIFEST
from common.detection.annotations import Annotations
from common.errors import DataError
from common.formats.jpeg import REMEDY, decode, jpeg_size
from common.formats.recordio import RecordReader

SPLITS = {"train": "train_samples", "val": "eval_samples"}
"""Split to the name of its number of pictures in the manifest."""


class CocoPictures:
    """Pictures of a split, by index.

    Args:
        path: the record file.
        annotations: ids and sizes of the pictures, in the order of the records.
        benchmark: benchmark whose commands prepare and check the data, for messages.

    Raises:
        DataError: the records are missing, damaged, or differ in number from the annotations.
    """

    def __init__(self, path: Path, annotations: Annotations, benchmark: str) -> None:
        self.annotations, self.path = annotations, path
        self._verify = f"check the data with 'mlperf-suite verify benchmark={benchmark}'"
        self._records = RecordReader(path)
        if len(self._records) != len(self):
            have, wanted = len(self._records), len(self)
            self._records.close()
            raise DataError(
                f"{path} has {have} records where {MANIFEST} says {wanted}; run '{prepare_command(benchmark)}'"
            )

    def __len__(self) -> int:
        return len(self.annotations.picture_id)

    def jpeg(self, place: int) -> bytes:
        """Return the encoded picture; raise :class:`DataError` if the record is damaged or has another picture."""
        record = self._records.image(place)
        if record.record_id != self.annotations.picture_id[place]:
            raise DataError(
                f"{self._records.describe(place)}: holds picture {record.record_id}, its boxes are those of picture "
                f"{self.annotations.picture_id[place]}; {self._verify}"
            )
        return record.data

    def whole_jpeg(self, place: int) -> bytes:
        """Return the encoded picture after a check of its size; raises the same errors as :meth:`picture`.

        For decoders that accept a truncated picture and leave the rest of it grey.
        """
        data = self.jpeg(place)
        try:
            found = jpeg_size(data)
        except ValueError as error:
            raise self._undecodable(place, error) from error
        if found != self.size(place):
            raise DataError(
                f"{self.describe(place)} is of {found} px, its boxes for {self.size(place)}; {self._verify}"
            )
        return data

    def size(self, place: int) -> tuple[int, int]:
        """Return width and height, px."""
        return int(self.annotations.picture_width[place]), int(self.annotations.picture_height[place])

    def picture(self, place: int) -> Image.Image:
        """Return the decoded picture; raise :class:`DataError` if it cannot be decoded, or as :meth:`jpeg`."""
        try:
            return decode(self.jpeg(place))
        except ValueError as error:
            raise self._undecodable(place, error) from error

    def describe(self, place: int) -> str:
        """Return a description of the picture, for messages."""
        return f"{self.path}: picture {self.annotations.picture_id[place]}"

    def refuse_more(self, count_P: NDArray[np.integer], room: int) -> None:
        """Refuse pictures with more than ``room`` boxes; ``count_P`` has the number of boxes of each.

        Raises:
            DataError: there is such a picture. The message names the one with most boxes.
        """
        place = int(count_P.argmax())
        if count_P[place] > room:
            raise DataError(
                f"{self.describe(place)} has {count_P[place]} boxes, and a batch has room for {room}: "
                f"use reader.max_boxes={count_P[place]}"
            )

    def close(self) -> None:
        """Close the records."""
        self._records.close()

    def _undecodable(self, place: int, error: ValueError) -> DataError:
        return DataError(f"{self.describe(place)} cannot be decoded: {error}; {REMEDY}")


def prepare_command(benchmark: str) -> str:
    """Return the command that prepares the data, for messages."""
    return f"mlperf-suite prepare benchmark={benchmark} --raw-dir RAW --data-dir DATA"
