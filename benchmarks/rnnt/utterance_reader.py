"""Reader that copies recorded utterances into batches, with threads that read memory-mapped files.

Legend: B utterances of a batch, A samples of all of them with gaps, U tokens (padded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.prepared import SpeechSplit
from common.data.threads import PendingBatch, SampleThreads

_ALIGNMENT = 8
"""Utterances begin at multiples of this number of samples: 16 bytes."""

_GRAIN = 1 << 18
"""A batch's audio has a multiple of this number of samples, so that device memory needs only few block sizes."""


class UtteranceReader:
    """Reader of a split's utterances.

    Args:
        threads: threads that copy.
        pin_memory: whether to use pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(self, split: SpeechSplit, threads: SampleThreads, pin_memory: bool) -> None:
        self._split, self._audio, self._threads, self._pin = split, split.audio(), threads, pin_memory

    def begin(
        self, utterance_B: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], tokens: int | None = None
    ) -> PendingBatch:
        """Begin a batch with ``audio``, ``audio_lengths``, ``audio_offsets`` and ``columns``.

        Args:
            utterance_B: the utterances; repeated ones are read once.
            columns: further columns of the batch, by name.
            tokens: U, for ``tokens`` and ``token_lengths``; None: a batch without them.
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
