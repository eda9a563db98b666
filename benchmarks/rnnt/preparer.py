"""Conversion of a reader's batch of recorded utterances to the network's input, on the device.

Legend: B utterances, T spliced frames (padded), F features per frame (padded).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from benchmarks.rnnt.data_settings import AudioFacts, Key
from benchmarks.rnnt.ops import features
from benchmarks.rnnt.ops.features.reference import NAMES, AudioBatch
from common.data.batches import Batch, HostBatch
from common.ops.operation import OPTION, OperationRequest, asked_for


class FeaturePreparer:
    """Computes features, without synchronization with the device.

    Args:
        columns: F.
        implementation: implementation of the operation ``features``.
        dtype: dtype of the features.

    Attributes:
        choice: name of the chosen implementation.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.operation.Operation.select`.
    """

    def __init__(
        self, facts: AudioFacts, columns: int, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        sizes = {name: getattr(facts, name) for name in ("window", "fft", "mel_filters", "silence_window")}
        sizes["percent_of_speed"] = math.floor(100 * facts.speed_min)
        with asked_for(f"{OPTION}.audio", implementation):
            chosen = features.FEATURES.select(implementation, OperationRequest(device, dtype, sizes))
        self.choice = chosen.name
        self._features, self._facts, self._columns = chosen.function, facts, columns
        self._device, self._dtype = device, dtype

    def __call__(self, host: HostBatch) -> Batch:
        """Return a training batch: the result of :meth:`tensors` with SpecAugment's masks."""
        key = host.key
        assert isinstance(key, tuple)
        return Batch(self.tensors(host.tensors, key[0], training=True), host.samples, host.key)

    def tensors(self, tensors: Mapping[str, Tensor], frames: int, training: bool) -> dict[str, Tensor]:
        """Return the batch with features instead of audio.

        These are ``features`` (T, B, F), zero beyond the utterances, and ``feature_lengths`` (B,) int32.

        Args:
            tensors: a reader's batch, on the host or on the device.
            frames: T.
            training: whether to apply SpecAugment's masks.
        """
        moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        made, length_B = self._features(AudioBatch.of(moved), self._facts, frames, self._columns, training, self._dtype)
        rest = {name: tensor for name, tensor in moved.items() if name not in NAMES}
        return {"features": made, "feature_lengths": length_B, **rest}

    def warm_up(self, batch: int, keys: Iterable[Key], training: bool = True) -> None:
        """Compute features of one synthetic batch of ``batch`` utterances per key, which compiles all kernels."""
        for key in keys:
            self.tensors(synthetic_batch(self._facts, batch, key), key[0], training)


def synthetic_batch(facts: AudioFacts, batch: int, key: Key) -> dict[str, Tensor]:
    """Return a reader's training batch of identical utterances of noise, with the maximum size of ``key``."""
    frames, tokens = key
    samples = facts.largest_resampled(frames)
    generator = torch.Generator().manual_seed(0)
    return {
        "audio": torch.randint(-1000, 1001, (samples,), generator=generator, dtype=torch.int16),
        "audio_lengths": torch.full((batch,), samples),
        "audio_offsets": torch.zeros(batch, dtype=torch.int64),
        "speeds": torch.ones(batch, dtype=torch.float64),
        "resampled_lengths": torch.full((batch,), samples),
        "utterance_seeds": torch.arange(batch),
        "tokens": torch.zeros((batch, tokens), dtype=torch.int32),
        "token_lengths": torch.full((batch,), tokens, dtype=torch.int32),
        "seed": torch.zeros(1, dtype=torch.int64),
    }
