"""Copies recorded utterances into batches: threads read them from files that are mapped into memory.

Legend: B utterances of a batch, A samples of all of them with gaps, U tokens (padded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.prepared import Split
from common.data.threads import PendingBatch, SampleThreads

_ALIGNMENT = 8
"""Utterances begin at multiples of so many samples: 16 bytes."""

_GRAIN = 1 << 18
"""Samples that a batch's audio is a multiple of, so that memory on the device comes in few sizes."""


class UtteranceReader:
    """Reads utterances of a split.

    Args:
        split: of the prepared data.
        threads: that copy.
        pin_memory: for copies to a GPU that nobody waits for.
    """

    def __init__(self, split: Split, threads: SampleThreads, pin_memory: bool) -> None:
        self._split, self._audio, self._threads, self._pin = split, split.audio(), threads, pin_memory

    def begin(
        self, utterance_B: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], tokens: int | None = None
    ) -> PendingBatch:
        """Begin a batch: ``audio``, ``audio_lengths`` and ``audio_offsets`` beside ``columns``.

        Args:
            utterance_B: the utterances; one that comes several times is read once.
            columns: what else the batch has, by name.
            tokens: U, for ``tokens`` and ``token_lengths``; None for a batch without them.
        """
        split = self._split
        distinct, place_B = np.unique(utterance_B, return_inverse=True)
        length = split.samples[distinct].astype(np.int64)
        end = np.cumsum(-(-length // _ALIGNMENT) * _ALIGNMENT)
        offset = end - -(-length // _ALIGNMENT) * _ALIGNMENT
        audio_A = self._empty(-(-int(end[-1]) // _GRAIN) * _GRAIN, torch.int16)
        tensors = {
            "audio": audio_A,
            "audio_lengths": self._column(length[place_B]),
            "audio_offsets": self._column(offset[place_B]),
            **{name: self._column(column) for name, column in columns.items()},
        }
        token_BU: NDArray[np.int32] | None = None
        if tokens is not None:
            tensors["token_lengths"] = self._column(split.token_lengths[utterance_B].astype(np.int32))
            tensors["tokens"] = self._empty((len(utterance_B), tokens), torch.int32).zero_()
            token_BU = tensors["tokens"].numpy()
        recorded_A = audio_A.numpy()

        def put(number: int) -> None:
            first = offset[number]
            recorded_A[first : first + length[number]] = self._audio[int(distinct[number])]

        if token_BU is not None:
            for slot, utterance in enumerate(utterance_B.tolist()):
                found = split.tokens_of(utterance)
                token_BU[slot, : len(found)] = found
        return self._threads.begin(tensors, len(distinct), put)

    def _empty(self, size: int | tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._pin)

    def _column(self, values: NDArray[Any]) -> Tensor:
        column = torch.from_numpy(np.ascontiguousarray(values))
        return column.pin_memory() if self._pin else column
