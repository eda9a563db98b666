"""A workload's description for the picture reader: its pictures, its columns and its transform of the pixels.

A split's :class:`Pictures` read encoded pictures by index. :class:`Columns` are all tensors of a batch besides the
pixels. A :class:`Transform` makes the pixels. Both readers use the same objects, so that a picture has the same random
augmentation in both.

Shapes: B pictures, H x W pixels, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from common.config.ranges import AtLeast, Share
from common.config.sections import ThreadedReaderConfig
from common.data.order import SampleShard, SampleStream, sample_generator
from common.errors import DataError
from common.formats.jpeg import REMEDY, decode, jpeg_size
from common.formats.recordio import ImageRecord

Sample = tuple[int, ...]
"""Epoch (0 in evaluation), index of the picture, and possibly further numbers for :class:`Columns`."""

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(ThreadedReaderConfig):
    """Options for reading pictures: the section ``reader`` of a recipe.

    Attributes:
        hw_decoder_load: fraction of the pictures that the GPU's JPEG engine decodes.
        input_batch_multiplier: micro-batches of one run of DALI's pipeline.
        eval_batch: pictures of one evaluation batch on one rank.
        reader: ``dali``, ``torchvision``, or ``auto``: DALI if it is installed.
    """

    hw_decoder_load: Annotated[float, Share]
    input_batch_multiplier: Annotated[int, AtLeast(1)]
    eval_batch: Annotated[int, AtLeast(1, "at least 1 picture")]
    reader: Literal["auto", "dali", "torchvision"] = "auto"


class Pictures(ABC):
    """Encoded pictures of one split, by index.

    Attributes:
        path: file or folder of the pictures, for messages.
    """

    path: Path

    @abstractmethod
    def record(self, index: int) -> ImageRecord:
        """Return the encoded picture with this index; raise :class:`DataError` if it is damaged."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """Return a description of the picture, for messages."""

    def size(self, index: int) -> tuple[int, int] | None:
        """Return the expected width and height, px. Default: any size is correct."""
        return None

    def close(self) -> None:
        """Close the files. Default: do nothing."""

    def picture(self, index: int, record: ImageRecord) -> Image.Image:
        """Decode a record.

        Raises:
            DataError: it cannot be decoded, or has another size than expected.
        """
        picture = self._read(index, record, decode)
        self._check_size(index, picture.size)
        return picture

    def picture_size(self, index: int, record: ImageRecord) -> tuple[int, int]:
        """Return width and height of a complete picture without decoding it; raises like :meth:`picture`.

        For decoders that accept a truncated picture and leave the rest of it grey.
        """
        size = self._read(index, record, jpeg_size)
        self._check_size(index, size)
        return size

    def _read(self, index: int, record: ImageRecord, read: Callable[[bytes], Read]) -> Read:
        try:
            return read(record.data)
        except ValueError as error:
            raise DataError(f"{self.describe(index)}: the picture cannot be decoded: {error}; {REMEDY}") from error

    def _check_size(self, index: int, found: tuple[int, int]) -> None:
        expected = self.size(index)
        if expected is not None and found != expected:
            raise DataError(
                f"{self.describe(index)} is {found[0]} x {found[1]} px, its boxes are for {expected[0]} x "
                f"{expected[1]}; {REMEDY}"
            )


class Columns(ABC):
    """The tensors of a batch besides the pixels, on the host."""

    def samples(self, stream: SampleStream, number: int) -> Sequence[Sample]:
        """Return the samples of this replica's micro-batch ``number``, one per slot."""
        return stream.samples_of(number)

    @abstractmethod
    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        """Return the columns of a batch before :meth:`put`, by name.

        Args:
            samples: samples of the first slots. The remaining slots are padding.
            pin_memory: use pinned memory, for asynchronous copies to a GPU.
        """

    def put(self, tensors: dict[str, Tensor], slot: int, sample: Sample, record: ImageRecord) -> Any:
        """Fill a slot of the columns. Default: :meth:`empty` has filled them.

        Returns:
            The picture's augmentation for :class:`Transform`, or None for none.
        """
        return None


@dataclass(frozen=True)
class TrainingSplit:
    """The pictures of training, and the micro-batches of one replica.

    Attributes:
        synthetic: whether the data are synthetic.
    """

    pictures: Pictures
    columns: Columns
    stream: SampleStream
    eval_samples: int
    synthetic: bool


@dataclass(frozen=True)
class EvaluationSplit:
    """The pictures of evaluation, and the batches of one replica."""

    pictures: Pictures
    columns: Columns
    shard: SampleShard


class Transform(ABC):
    """Turns encoded pictures into the tensor ``image``, by Pillow and PyTorch or by DALI.

    Attributes:
        shape: H, W, C of the result.
        neutral: DALI's inputs for a picture without augmentation, if training needs such inputs.
        largest: width and height, px, for which DALI's decoder allocates memory before training.
        padding_bytes: size of nvJPEG's device and pinned buffers, which are allocated before training.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    neutral: tuple[float, ...] = ()
    largest: tuple[int, int]
    padding_bytes: int

    @abstractmethod
    def write(self, picture: Image.Image, augmentation: Any, out_HWC: Tensor) -> None:
        """Transform a decoded picture into ``out_HWC``, which is zero.

        Args:
            augmentation: result of :meth:`Columns.put`.
        """

    def numbers(self, augmentation: Any, width: int, height: int) -> Sequence[float]:
        """Return DALI's inputs for an augmentation of a picture of ``width`` x ``height`` px, like ``neutral``."""
        raise NotImplementedError

    def graph(self, dali: Any, picture: Any, numbers: Any) -> Any:
        """Return the DALI node that transforms decoded pictures. The base class raises NotImplementedError.

        Args:
            dali: the module ``nvidia.dali``.
            numbers: node of their numbers, fp32, in training if ``neutral`` is not empty; otherwise None.
        """
        raise NotImplementedError

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a batch, given the columns and ``image`` (B, H, W, C). Default: channels first."""
        return tensors | {"image": tensors["image"].permute(0, 3, 1, 2)}


class Normalizer:
    """Computes ``(pixel - mean) / std`` with one lookup table per channel, for any dtype, including bfloat16.

    Args:
        mean, std: values per channel, on the scale 0 to 255.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> None:
        values = torch.arange(256, dtype=torch.float32)[:, None]
        table = (values - torch.tensor(mean)) / torch.tensor(std)
        self._bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        self._table = table.to(dtype).T.contiguous().view(self._bits).numpy()  # (C, 256)

    def write(self, pixels_HWC: NDArray[np.uint8], out_HWC: Tensor) -> None:
        """Normalise ``pixels_HWC`` into the first channels of ``out_HWC``, one per mean; keep the other channels."""
        out = out_HWC.view(self._bits).numpy()
        for channel, levels in enumerate(self._table):
            out[:, :, channel] = np.take(levels, pixels_HWC[:, :, channel])


def mirrored(probability: float, seed: int, epoch: int, index: int) -> bool:
    """Return whether a training picture is flipped left to right in an epoch.

    The answer is random with ``probability``, but depends only on the arguments.
    """
    return bool(sample_generator(seed, epoch, index).random() < probability)


def other_classes(root: Path, found: int, known: int) -> DataError:
    """Return the error for data under ``root`` with ``found`` classes where the model has ``known``."""
    return DataError(f"{root} holds {found} classes where the model has {known}: it is another data set")
