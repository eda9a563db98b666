"""Options for reading pictures with boxes: the section ``reader`` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import AtLeast, Share


@dataclass(frozen=True)
class ReaderConfig:
    """Options for reading pictures.

    Attributes:
        threads: CPU threads of the reader.
        prefetch: batches that the reader reads ahead.
        max_boxes: capacity of a batch, in boxes per picture.
        hw_decoder_load: fraction of the pictures that the GPU's JPEG engine decodes.
        input_batch_multiplier: micro-batches of one run of DALI's pipeline.
        eval_batch: pictures of one evaluation batch on one rank.
        reader: ``dali``, ``torchvision``, or ``auto``: DALI if it is installed.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 batch")]
    max_boxes: Annotated[int, AtLeast(1)]
    hw_decoder_load: Annotated[float, Share]
    input_batch_multiplier: Annotated[int, AtLeast(1)]
    eval_batch: Annotated[int, AtLeast(1, "at least 1 picture")]
    reader: Literal["auto", "dali", "torchvision"] = "auto"
