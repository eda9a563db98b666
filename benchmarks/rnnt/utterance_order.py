"""Order of RNN-T's training utterances, and factor of each duration, as a pure function of (seed, epoch, position).

For each epoch, the utterances are sorted by duration, split into buckets of equal size, shuffled within each bucket,
and concatenated. (One bucket is a plain shuffle.) Random utterances are dropped so that whole global batches remain.
These are cut and shuffled. No global batch spans two epochs.

A global batch is presorted: shortest, longest, second shortest, second longest, and so on, by duration at the speed
that is drawn per utterance and epoch. The micro-batches of all ranks get consecutive ranges of it, in the order of
their streams (see :mod:`common.data.order`). Each micro-batch therefore has long and short utterances, and about equal
work. One replica that accumulates N micro-batches reads the same as N replicas with one each.

Legend: P utterances, G global batches of an epoch, N utterances of a global batch, L streams of micro-batches,
B utterances of a micro-batch.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.rnnt.data_settings import Key, SpeechDataSettings, joint_rows, resampled, spliced_frames
from common.data.batches import Block
from common.data.order import MicroBatches, sample_generator
from common.errors import ConfigError, DataError

_SPEEDS, _UTTERANCES, _DROPPED, _BATCHES, _BUCKET = range(4, 9)
"""Purposes of random numbers; :mod:`common.data.order` and related modules use the lower numbers."""

_KEPT_EPOCHS = 3
"""Cached epochs: the current one, the next, which is computed in advance, and the previous one."""


@dataclass(frozen=True)
class Epoch:
    """Random choices of an epoch.

    Attributes:
        order_GLB: utterances of the micro-batches of all streams, the longest of each first, int64.
        speed_P: factor of each utterance's duration, fp64.
        samples_P: samples of each utterance after resampling, int64.
        seed_P: random seed of each utterance's noise and masks, int64.
    """

    order_GLB: NDArray[np.int64]
    speed_P: NDArray[np.float64]
    samples_P: NDArray[np.int64]
    seed_P: NDArray[np.int64]


@dataclass(frozen=True)
class DrawnUtterances:
    """A micro-batch, with the longest utterance first.

    Attributes:
        epoch: index of the epoch, from 0.
        utterance_B: indices of the utterances, int64.
        speed_B, samples_B, seed_B: factor of the duration, samples after resampling, and random seed of each.
    """

    epoch: int
    utterance_B: NDArray[np.int64]
    speed_B: NDArray[np.float64]
    samples_B: NDArray[np.int64]
    seed_B: NDArray[np.int64]


def kept_samples(train_samples: int, global_batch: int) -> int:
    """Return the number of utterances per epoch in whole global batches.

    Raises:
        ConfigError: they do not fill one global batch.
    """
    kept = train_samples // global_batch * global_batch
    if not kept:
        raise ConfigError(f"hparams.global_batch_size={global_batch}: an epoch has {train_samples} utterances")
    return kept


class UtteranceStream:
    """One replica's training utterances; a :class:`common.data.order.SampleStream`.

    Args:
        samples_P: int64, recorded samples of each utterance; those too long for training are already removed.
        settings: speeds, buckets, and utterances per epoch.
        seed: random seed of all choices.

    Attributes:
        train_samples: utterances of an epoch, all ranks together.

    Raises:
        DataError: there are fewer utterances than an epoch needs, or one fits no bucket of ``reader.buckets``.
        ConfigError: a global batch is larger than an epoch.
    """

    def __init__(
        self,
        samples_P: NDArray[np.integer],
        tokens_P: NDArray[np.integer],
        settings: SpeechDataSettings,
        mine: MicroBatches,
        seed: int,
    ) -> None:
        self.micro_batch, self.replicas, self.seed = mine.micro_batch, mine.replicas, seed
        self._global_batch = mine.micro_batch * mine.streams
        self.train_samples = kept_samples(settings.train_samples, self._global_batch)
        if len(samples_P) < self.train_samples:
            raise DataError(
                f"{len(samples_P)} training utterances last up to {settings.max_duration} s, and an epoch trains on "
                f"{self.train_samples}: give benchmark.train_samples={len(samples_P)}, or the data that belong to the "
                "recipe"
            )
        self._samples_P, self._tokens_P = samples_P.astype(np.int64), tokens_P.astype(np.int64)
        self._settings, self._mine = settings, mine
        self._check_buckets()
        self._by_duration = np.argsort(self._samples_P, kind="stable")
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="epochs")
        self._epochs: dict[int, Future[Epoch]] = {}

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of this replica's micro-batches before ``block``."""
        return self._mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Return the number of this replica's micro-batches in ``block``, which is equal on all replicas."""
        return self._mine.count(block)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (epoch from 0, utterance) pairs of this replica's micro-batch ``number``, the longest first."""
        drawn = self.drawn(number)
        return [(drawn.epoch, utterance) for utterance in drawn.utterance_B.tolist()]

    def drawn(self, number: int) -> DrawnUtterances:
        """Return this replica's micro-batch ``number``, counted from the start of training."""
        step, accumulation_step = self._mine.step_of(number)
        epoch, index = divmod(step, self.train_samples // self._global_batch)
        drawn = self.epoch(epoch)
        utterance_B = drawn.order_GLB[index, self._mine.stream(accumulation_step)]
        return DrawnUtterances(
            epoch, utterance_B, drawn.speed_P[utterance_B], drawn.samples_P[utterance_B], drawn.seed_P[utterance_B]
        )

    def key(self, number: int) -> tuple[int, ...]:
        """Return the spliced frames and tokens to which micro-batch ``number`` is padded.

        The number of packed rows is appended if it exceeds the capacity of ``reader.rows``.
        """
        drawn = self.drawn(number)
        tokens_B = self._tokens_P[drawn.utterance_B]
        frames_B = spliced_frames(drawn.samples_B, self._settings.facts)
        key = self._bucket(int(frames_B.max()), int(tokens_B.max()))
        assert key is not None, "the buckets were not checked for such utterances"
        rows = joint_rows(frames_B, tokens_B)
        return key if rows <= self._settings.reader.rows.capacity(self.micro_batch, key) else (*key, rows)

    def random_seed(self, number: int) -> int:
        """Return a seed in [0, 2**63) for micro-batch ``number``; it does not depend on the number of ranks."""
        return self._mine.random_seed(self.seed, number)

    def epoch(self, epoch: int) -> Epoch:
        """Return the random choices of ``epoch`` (from 0); a thread computes the next epoch in advance."""
        for wanted in (epoch, epoch + 1):
            if wanted not in self._epochs:
                self._epochs[wanted] = self._pool.submit(self._drawn_epoch, wanted)
        for old in sorted(self._epochs, key=lambda kept: abs(kept - epoch))[_KEPT_EPOCHS:]:
            del self._epochs[old]
        return self._epochs[epoch].result()

    def close(self) -> None:
        """End the thread that computes epochs."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _drawn_epoch(self, epoch: int) -> Epoch:
        count, facts = len(self._samples_P), self._settings.facts
        speed_P = sample_generator(self.seed, _SPEEDS, epoch).uniform(facts.speed_min, facts.speed_max, count)
        samples_P = resampled(self._samples_P, speed_P)
        seed_P = sample_generator(self.seed, _UTTERANCES, epoch).integers(2**63, size=count)
        order_GN = interleaved(self._global_batches(epoch), samples_P)
        order_GLB = order_GN.reshape(len(order_GN), self._mine.streams, self.micro_batch)
        longest_first = np.argsort(-samples_P[order_GLB], axis=2, kind="stable")
        return Epoch(np.take_along_axis(order_GLB, longest_first, 2), speed_P, samples_P, seed_P)

    def _global_batches(self, epoch: int) -> NDArray[np.int64]:
        """Return the utterances of each global batch, in the order of training: [G, N]."""
        buckets = np.array_split(self._by_duration, self._settings.num_buckets)
        shuffled = [
            sample_generator(self.seed, _BUCKET, epoch, number).permutation(bucket)
            for number, bucket in enumerate(buckets)
        ]
        order_P = np.concatenate(shuffled)
        dropped = len(order_P) - self.train_samples
        positions = sample_generator(self.seed, _DROPPED, epoch).choice(len(order_P), dropped, replace=False)
        order_GN = np.delete(order_P, positions).reshape(-1, self._global_batch)
        return order_GN[sample_generator(self.seed, _BATCHES, epoch).permutation(len(order_GN))]

    def _bucket(self, frames: int, tokens: int) -> Key | None:
        """Return the smallest bucket that fits this number of spliced frames and tokens, or None."""
        fitting = [key for key in self._settings.reader.buckets if frames <= key[0] and tokens <= key[1]]
        return min(fitting, key=lambda key: (key[0] * (key[1] + 1), key), default=None)

    def _check_buckets(self) -> None:
        """Check that every micro-batch fits a bucket, even if the longest utterance and the most tokens meet in one."""
        facts = self._settings.facts
        longest = resampled(self._samples_P.max(keepdims=True), np.array([facts.speed_max]))
        frames, tokens = int(spliced_frames(longest, facts)[0]), int(self._tokens_P.max())
        if self._bucket(frames, tokens) is None:
            buckets = [list(key) for key in self._settings.reader.buckets]
            raise DataError(
                f"a micro-batch can have {frames} frames (an utterance of {self._samples_P.max()} samples, played "
                f"{facts.speed_max} times as long) and {tokens} tokens, which fit none of reader.buckets={buckets}: "
                "add a bucket"
            )


def interleaved(order_GN: NDArray[np.int64], samples_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each global batch of ``order_GN`` as shortest, longest, second shortest, second longest, and so on."""
    shortest_first = np.argsort(samples_P[order_GN], axis=1, kind="stable")
    sorted_GN = np.take_along_axis(order_GN, shortest_first, 1)
    mixed_GN = np.empty_like(sorted_GN)
    half = -(-sorted_GN.shape[1] // 2)
    mixed_GN[:, 0::2] = sorted_GN[:, :half]
    mixed_GN[:, 1::2] = sorted_GN[:, half:][:, ::-1]
    return mixed_GN
