"""Configuration that all detectors share: sections ``model`` and ``reader`` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.config.ranges import AtLeast
from common.config.sections import NetworkConfig
from common.vision.pictures import ReaderConfig


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(NetworkConfig):
    """Initial weights of the backbone, loss scale and implementations of operations.

    Attributes:
        backbone: file in ``assets_dir`` with the initial weights of the backbone. Without ``assets_dir``, the weights
            are random.
    """

    backbone: str


@dataclass(frozen=True, kw_only=True)
class BoxReaderConfig(ReaderConfig):
    """Options for reading pictures with boxes.

    Attributes:
        max_boxes: capacity of a batch, in boxes per picture.
    """

    max_boxes: Annotated[int, AtLeast(1)]
