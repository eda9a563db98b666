"""Device time of the stages of an evaluation, measured without synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from common.ops.device_clock import stamp


class StageTimes:
    """Adds up the time between two points of the current stream, for each stage."""

    def __init__(self, stages: Sequence[str], device: torch.device | str = "cpu") -> None:
        self._indices = {stage: index for index, stage in enumerate(stages)}
        self._nanoseconds = torch.zeros(len(self._indices), dtype=torch.int64, device=device)
        self._moments = torch.zeros(2, 1, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Reset all times, at the start of an evaluation."""
        self._nanoseconds.zero_()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure the work that is queued within the context as ``stage``. Stages must not be nested.

        A context that fails is not counted.

        Raises:
            KeyError: there is no such stage.
        """
        index = self._indices[stage]
        stamp(self._moments[0])
        yield
        stamp(self._moments[1])
        self._nanoseconds[index] += (self._moments[1] - self._moments[0]).squeeze()

    def seconds(self) -> Tensor:
        """Return the seconds of every stage, in the order of the names, as float64 on the device."""
        return self._nanoseconds.double() * 1e-9
