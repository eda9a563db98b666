"""RNN-T's data: batches of prepared utterances (see :mod:`benchmarks.rnnt.prepared`).

A training batch has the longest utterance first. Its key is
:meth:`benchmarks.rnnt.utterance_order.UtteranceStream.key`. Its tensors:

- ``audio`` (A,) int16, ``audio_offsets``, ``audio_lengths`` (B,) int64: recorded samples, with gaps between
  utterances;
- ``speeds`` (B,) fp64, ``resampled_lengths`` (B,) int64: factor of each duration, and the resulting samples;
- ``utterance_seeds`` (B,) int64: random seeds of each utterance's noise and masks;
- ``tokens`` (B, U) int32, ``token_lengths`` (B,) int32; ``seed`` (1,) int64, random seed of the batch.

An evaluation batch, whose key is ``("eval", T)`` with T padded frames, has ``utterance`` (B,) int64 (index in the
evaluation set, :data:`PADDING` in unused slots) instead of tokens and seed.
:class:`benchmarks.rnnt.preparer.FeaturePreparer` computes the features of both on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.data_settings import AudioFacts, SpeechDataSettings
from benchmarks.rnnt.lengths import spliced_frames
from benchmarks.rnnt.prepared import open_prepared
from benchmarks.rnnt.utterance_order import UtteranceStream
from benchmarks.rnnt.utterance_reader import UtteranceReader
from common.data.batches import DataSource, EvalSource
from common.data.order import MicroBatches, sample_generator
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError

PADDING = -1
"""Index of utterances in unused slots."""

PREFETCH = 4
"""Micro-batches that are read ahead."""

_EVALUATION = 9
"""Purpose of random numbers; :mod:`benchmarks.rnnt.utterance_order` uses the lower numbers."""


def open_train(
    root: Path, settings: SpeechDataSettings, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data in ``root`` for this rank; call it after ``run_start``.

    Args:
        layout: the replica (axis dp), the device and the seed.
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
        stream, prepared.manifest.counts["eval_samples"], prepared.stand_in, threads, begin, stream.close
    )


def open_eval(root: Path, settings: SpeechDataSettings, layout: Layout) -> EvalSource:
    """Open the evaluation data in ``root`` for this rank; call it after ``run_start``. Every length is kept.

    Raises:
        DataError: see :func:`open_train`; or an utterance is longer than all of ``reader.eval_buckets``.
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
        utterance_B = np.array([*utterances, *[shard.stand_in] * (batch - real)], np.int64)
        columns = {
            "speeds": np.ones(batch),
            "resampled_lengths": split.samples[utterance_B].astype(np.int64),
            "utterance_seeds": seeds_N[utterance_B],
            "utterance": np.where(np.arange(batch) < real, utterance_B, PADDING),
        }
        return reader.begin(utterance_B, columns)

    return ThreadedEvalSource(shard, threads, begin, lambda: None)


def _require_length(samples_P: NDArray[np.integer], settings: SpeechDataSettings, root: Path) -> None:
    """Check that all utterances, at their shortest duration, are long enough to be reflected at their ends."""
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
        samples_N: samples of each utterance.
        buckets: padded lengths of batches, in spliced frames, ascending.
        batch: utterances of a batch of one replica.
        replicas, replica: number of replicas that share the set, and index of this one.

    Attributes:
        stand_in: utterance that fills unused slots: the shortest.

    Raises:
        DataError: there is no utterance, or one is longer than all of ``buckets``.
    """

    def __init__(
        self,
        samples_N: NDArray[np.integer],
        buckets: Sequence[int],
        facts: AudioFacts,
        batch: int,
        replicas: int = 1,
        replica: int = 0,
    ) -> None:
        for name, value in (("eval_batch", batch), ("replicas", replicas)):
            if value < 1:
                raise ConfigError(f"{name}={value}: an evaluation needs at least 1")
        if not 0 <= replica < replicas:
            raise ConfigError(f"replica {replica} lies outside of {replicas} replicas")
        if not len(samples_N):
            raise DataError("the evaluation set has no utterance; prepare it again")
        longest_first = np.argsort(-samples_N.astype(np.int64), kind="stable")
        self.eval_samples, self.batch, self.replicas = len(samples_N), batch, replicas
        self.stand_in = int(longest_first[-1])
        self._mine = longest_first[replica::replicas]
        self.batches = -(-len(samples_N) // (batch * replicas))
        heads = longest_first[:: batch * replicas]
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
