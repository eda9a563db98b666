"""Cache on the device for the pictures of the evaluation, which are decoded only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from common.data.batches import EvalSource, HostBatch


class KeptSource:
    """A :class:`common.data.batches.EvalSource` that keeps the batches of the first complete evaluation.

    Args:
        source: source of the batches, which is closed after this evaluation.
        device: device for the cached batches.
    """

    def __init__(self, source: EvalSource, device: torch.device) -> None:
        self.eval_samples = source.eval_samples
        self._source: EvalSource | None = source
        self._length, self._device = len(source), device
        self._kept: list[HostBatch] = []

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation, on the device. Raises the errors of the source."""
        if self._source is None:
            yield from self._kept
            return
        kept = []
        for batch in self._source:
            tensors = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.tensors.items()}
            kept.append(dataclasses.replace(batch, tensors=tensors))
            yield kept[-1]
        self._kept = kept
        self._close_source()

    def close(self) -> None:
        """Close the source and free the batches."""
        self._close_source()
        self._kept = []

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
