"""RNN-T's data: batches of prepared utterances, and their features (see :mod:`benchmarks.rnnt.prepared`).

A training batch has the longest utterance first. Its key is
:meth:`benchmarks.rnnt.utterance_order.UtteranceStream.key`. Its tensors:

- ``audio`` (A,) int16, ``audio_offsets``, ``audio_lengths`` (B,) int64: recorded samples, with gaps between
  utterances;
- ``speeds`` (B,) fp64, ``resampled_lengths`` (B,) int64: factor of each duration, and the resulting samples;
- ``utterance_seeds`` (B,) int64: random seeds of each utterance's noise and masks;
- ``tokens`` (B, U) int32, ``token_lengths`` (B,) int32; ``seed`` (1,) int64, random seed of the batch.

An evaluation batch, whose key is ``("eval", T)`` with T padded frames, has ``utterance`` (B,) int64 (index in the
evaluation set, :data:`PADDING` in unused slots) instead of tokens and seed.
:class:`FeaturePreparer` replaces audio by features of both on the device.

Legend: B utterances of a batch, A samples of all of them with gaps, U tokens (padded), T spliced frames (padded), F
features per frame (padded), N utterances of the evaluation set, P of the training set.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.data_settings import AudioFacts, Key, SpeechDataSettings, spliced_frames
from benchmarks.rnnt.ops import features
from benchmarks.rnnt.ops.features.reference import NAMES, AudioBatch
from benchmarks.rnnt.prepared import SpeechSplit, open_prepared
from benchmarks.rnnt.utterance_order import UtteranceStream
from common.data.batches import Batch, DataSource, EvalSource, HostBatch
from common.data.order import MicroBatches, sample_generator
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import DataError
from common.ops.operation import OPTION, OperationRequest, asked_for

PADDING = -1
"""Index of utterances in unused slots."""

PREFETCH = 4
"""Micro-batches that are read ahead."""

_EVALUATION = 9
"""Purpose of random numbers; :mod:`benchmarks.rnnt.utterance_order` uses the lower numbers."""


_ALIGNMENT = 8
"""Utterances begin at multiples of this number of samples: 16 bytes."""

_GRAIN = 1 << 18
"""A batch's audio has a multiple of this number of samples, so that device memory needs only few block sizes."""


class UtteranceReader:
    """Reader that copies utterances from memory-mapped files into batches, in threads.

    Args:
        pin_memory: whether to use pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(self, split: SpeechSplit, threads: SampleThreads, pin_memory: bool) -> None:
        self._split, self._audio, self._threads, self._pin = split, split.audio(), threads, pin_memory

    def begin(
        self, utterance_B: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], tokens: int | None = None
    ) -> PendingBatch:
        """Begin a batch with ``audio``, ``audio_lengths``, ``audio_offsets`` and ``columns``.

        Args:
            utterance_B: the utterances; repeated ones are read once and share their audio.
            columns: further columns of the batch, by name.
            tokens: U, for ``tokens`` and ``token_lengths``; None: a batch without them.
        """
        split = self._split
        distinct, index_B = np.unique(utterance_B, return_inverse=True)
        length = split.samples[distinct].astype(np.int64)
        aligned = -(-length // _ALIGNMENT) * _ALIGNMENT
        end = np.cumsum(aligned)
        offset = end - aligned
        audio_A = self._empty(-(-int(end[-1]) // _GRAIN) * _GRAIN, torch.int16)
        tensors = {
            "audio": audio_A,
            "audio_lengths": self._column(length[index_B]),
            "audio_offsets": self._column(offset[index_B]),
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


def open_train(
    root: Path, settings: SpeechDataSettings, layout: Layout, micro_batch: int, accumulation: int
) -> DataSource:
    """Open the training data in ``root`` for this rank; call it after ``run_start``.

    Args:
        layout: gives replica (axis ``dp``), device and seed.
        micro_batch: utterances of a micro-batch of one replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: manifest or files are missing or damaged, or do not fit the settings.
        ConfigError: a global batch is larger than an epoch.
    """
    prepared = open_prepared(root)
    split = prepared.split("train")
    kept_P = np.flatnonzero(split.samples <= settings.max_duration * settings.facts.sample_rate)
    if not len(kept_P):
        raise DataError(f"{root} has no training utterance of at most max_duration={settings.max_duration} s")
    _require_length(split.samples[kept_P], settings, root)
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    stream = UtteranceStream(split.samples[kept_P], split.token_lengths[kept_P], settings, mine, layout.seed)
    threads = SampleThreads(settings.reader.threads, PREFETCH)
    reader = UtteranceReader(split, threads, layout.device.type == "cuda")

    def begin(number: int) -> PendingBatch:
        drawn, key = stream.drawn(number), stream.key(number)
        columns = {
            "speeds": drawn.speed_B,
            "resampled_lengths": drawn.samples_B,
            "utterance_seeds": drawn.seed_B,
            "seed": np.array([stream.random_seed(number)]),
        }
        return reader.begin(kept_P[drawn.utterance_B], columns, key[1])

    return ThreadedTrainSource(
        stream, prepared.manifest.counts["eval_samples"], prepared.synthetic, threads, begin, stream.close
    )


def open_eval(root: Path, settings: SpeechDataSettings, layout: Layout) -> EvalSource:
    """Open the evaluation data in ``root`` for this rank; call it after ``run_start``. Utterances of any length count.

    Raises:
        DataError: manifest or files are missing or damaged, or an utterance is longer than all of
            ``reader.eval_buckets``.
    """
    prepared = open_prepared(root)
    split = prepared.split("eval")
    _require_length(split.samples, settings, root)
    batch = settings.reader.eval_batch
    shard = EvalBatches(
        split.samples, settings.reader.eval_buckets, settings.facts, batch, layout.size("dp"), layout.index("dp")
    )
    seeds_N = sample_generator(layout.seed, _EVALUATION).integers(2**63, size=len(split))
    threads = SampleThreads(settings.reader.threads, PREFETCH)
    reader = UtteranceReader(split, threads, layout.device.type == "cuda")

    def begin(utterances: Sequence[int]) -> PendingBatch:
        real = len(utterances)
        utterance_B = np.array([*utterances, *[shard.filler] * (batch - real)], np.int64)
        columns = {
            "speeds": np.ones(batch),
            "resampled_lengths": split.samples[utterance_B].astype(np.int64),
            "utterance_seeds": seeds_N[utterance_B],
            "utterance": np.where(np.arange(batch) < real, utterance_B, PADDING),
        }
        return reader.begin(utterance_B, columns)

    return ThreadedEvalSource(shard, threads, begin, lambda: None)


def _require_length(samples_P: NDArray[np.integer], settings: SpeechDataSettings, root: Path) -> None:
    """Check that all utterances, at their shortest duration, exceed half a window, for reflection at the ends."""
    facts = settings.facts
    if len(samples_P) and samples_P.min() * min(1.0, facts.speed_min) <= facts.window // 2:
        raise DataError(
            f"{root} has an utterance of {samples_P.min()} samples, and a frame takes more than {facts.window // 2} to "
            "each side of its middle; leave such files out and prepare the data again"
        )


class EvalBatches:
    """One replica's part of an evaluation set: batches of utterances of similar length, the longest first.

    A :class:`common.data.order.SampleShard`. Utterances are sorted by length and assigned to the replicas in turn, so
    that batches with the same index have the same padding on all replicas.

    Args:
        buckets: padded lengths of batches, in spliced frames, ascending.
        replicas, replica: number of replicas that share the set, and index of this one.

    Attributes:
        filler: utterance that fills unused slots: the shortest.

    Raises:
        DataError: there is no utterance, or one is longer than all of ``buckets``.
    """

    def __init__(
        self,
        samples_N: NDArray[np.integer],
        buckets: Sequence[int],
        facts: AudioFacts,
        batch: int,
        replicas: int,
        replica: int,
    ) -> None:
        if not len(samples_N):
            raise DataError("the evaluation set has no utterance; prepare it again")
        longest_first = np.argsort(-samples_N.astype(np.int64), kind="stable")
        self.eval_samples, self.batch, self.replicas = len(samples_N), batch, replicas
        self.filler = int(longest_first[-1])
        self._mine = longest_first[replica::replicas]
        self.batches = -(-len(samples_N) // (batch * replicas))
        heads = longest_first[:: batch * replicas]  # the longest utterance of each batch, over all replicas
        frames = spliced_frames(samples_N[heads].astype(np.int64), facts)
        if frames[0] > buckets[-1]:
            seconds = samples_N.max() / facts.sample_rate
            raise DataError(
                f"an evaluation utterance has {frames[0]} frames ({seconds:.2f} s), more than all of "
                f"reader.eval_buckets={list(buckets)}: add a bucket"
            )
        self._keys = [("eval", min(bucket for bucket in buckets if bucket >= most)) for most in frames]

    def samples(self, batch: int) -> Sequence[int]:
        """Return the real utterances of ``batch`` (counted from 0), the longest first."""
        found: list[int] = self._mine[batch * self.batch : (batch + 1) * self.batch].tolist()
        return found

    def valid(self, batch: int) -> int:
        """Return the number of real utterances of ``batch``."""
        return len(self.samples(batch))

    def key(self, batch: int) -> Hashable:
        """Return ``"eval"`` and the spliced frames to which ``batch`` is padded."""
        return self._keys[batch]


class FeaturePreparer:
    """Conversion of recorded utterances to features on the device. It never waits for the device.

    Args:
        columns: F.
        implementation: requested implementation of the operation ``features``.

    Attributes:
        choice: name of the chosen implementation.

    Raises:
        UnsupportedImplementation: the requested implementation cannot be used.
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
        """Return a training batch, with SpecAugment's masks on its features."""
        key = host.key
        assert isinstance(key, tuple)
        return Batch(self.tensors(host.tensors, key[0], training=True), host.samples, host.key)

    def tensors(self, tensors: Mapping[str, Tensor], frames: int, training: bool) -> dict[str, Tensor]:
        """Replace a batch's audio by ``features`` (T, B, F), zero beyond each utterance, and their lengths (B,), int32.

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
        """Compute features of one synthetic batch of ``batch`` utterances per key, which compiles all kernels.

        Args:
            training: whether features are augmented as in training.
        """
        for key in keys:
            self.tensors(synthetic_batch(self._facts, batch, key), key[0], training)


def synthetic_batch(facts: AudioFacts, batch: int, key: Key) -> dict[str, Tensor]:
    """Return a reader's training batch of equal utterances of noise that fill ``key``."""
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
