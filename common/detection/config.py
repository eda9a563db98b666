"""Configuration that all detectors share: sections ``model`` and ``reader`` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from common.config.ranges import AtLeast, Positive
from common.ops.operation import Operation, all_implementations
from common.vision.pictures import ReaderConfig


@dataclass(frozen=True)
class DetectorConfig:
    """Initial weights of the backbone, loss scale and implementations of operations.

    Attributes:
        backbone: file in ``assets_dir`` with the initial weights of the backbone. Without ``assets_dir``, the weights
            are random.
        loss_scale: initial loss scale with fp16.
        implementations: operation name to implementation. Missing operations use ``auto``.
    """

    operations: ClassVar[Mapping[str, Operation]]
    backbone: str
    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, self.operations))


@dataclass(frozen=True, kw_only=True)
class BoxReaderConfig(ReaderConfig):
    """Options for reading pictures with boxes.

    Attributes:
        max_boxes: capacity of a batch, in boxes per picture.
    """

    max_boxes: Annotated[int, AtLeast(1)]
