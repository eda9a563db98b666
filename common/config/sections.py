"""Base classes of the sections ``model`` and ``reader`` in the configuration of a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from common.config.ranges import AtLeast, Positive
from common.errors import ConfigError
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


def used_layers(facts: Any, model: Any, network: str, *names: str) -> Any:
    """Return ``facts`` with the numbers of layers that the section ``model`` asks for; 0 stands for all.

    Args:
        network: name of the network, for messages.
        names: fields of ``facts`` and ``model`` with a number of layers.

    Raises:
        ConfigError: a number is larger than that of ``facts``.
    """
    for name in names:
        if (asked := getattr(model, name)) > (whole := getattr(facts, name)):
            raise ConfigError(f"model.{name}={asked}: the {network} has {whole}; 0 uses all")
    return dataclasses.replace(facts, **{name: getattr(model, name) or getattr(facts, name) for name in names})


def leaves_out_layers(model: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether settings of the section ``model`` leave out layers of ``facts``; 0 stands for all."""
    return any(used not in (None, 0, facts[name]) for name, used in model.items() if name in facts)


def unused_layers(own: Any, network: str, *names: str) -> list[str]:
    """Return a message for each setting of ``model`` that leaves out layers of ``facts``; such a run is not valid."""
    asked = {name: (getattr(own.model, name), getattr(own.facts, name)) for name in names}
    return [
        f"model.{name}={used}: the {network} has {whole}"
        for name, (used, whole) in asked.items()
        if used not in (0, whole)
    ]
