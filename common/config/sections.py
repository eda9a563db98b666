"""Base classes of the sections ``model`` and ``reader`` in the configuration of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from common.config.ranges import AtLeast, Positive
from common.ops.operation import Operation, all_implementations


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Base of ``model``.

    Attributes:
        operations: the operations whose implementation can be chosen, by name.
        loss_scale: initial loss scale with fp16.
        implementations: implementation by operation name; ``auto`` for operations that are not listed.
    """

    operations: ClassVar[Mapping[str, Operation]]
    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, self.operations))


@dataclass(frozen=True, kw_only=True)
class ThreadedReaderConfig:
    """Base of ``reader`` where threads read samples.

    Attributes:
        threads: CPU threads of the reader.
        prefetch: batches that are read ahead.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 batch")]
