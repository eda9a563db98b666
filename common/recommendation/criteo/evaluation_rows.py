"""Evaluation samples of prepared click logs, in batches of one size on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.data.batches import HostBatch
from common.data.direct_reader import PIECE_BYTES
from common.data.order import EvalShard
from common.recommendation.criteo.prepared import open_prepared
from common.recommendation.criteo.row_reader import RowFile, RowReaderSettings
from common.recommendation.criteo.sample_rows import WORD, SampleFormat
from common.recommendation.tables import Tables


class ClickEvaluationRows:
    """Evaluation batches of one replica; a :class:`common.data.batches.EvalSource`. Iterate once per evaluation.

    A batch has ``label`` (B,), ``dense`` (B, D) and ``ids`` (B, L) from :meth:`SampleFormat.decode`, and ``count``,
    0-d int64: the first ``count`` samples are real, the others are padding with all words 0.

    Attributes:
        resident: whether batches stay on the device after the first pass.
    """

    def __init__(
        self,
        file: RowFile,
        sample_format: SampleFormat,
        words: int,
        shard: EvalShard,
        device: torch.device,
        resident_gb: float,
    ) -> None:
        self.eval_samples = shard.eval_samples
        self.resident = shard.batches * shard.batch * words * WORD <= resident_gb * 1e9
        self._file, self._format, self._words = file, sample_format, words
        self._shard, self._device = shard, device
        self._kept: list[HostBatch] = []

    def __len__(self) -> int:
        return self._shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        yield from self._kept
        done = len(self._kept)
        if done == len(self):
            return
        ranges = [part for number in range(done, len(self)) for part in self._parts(number)]
        read = self._file.read(ranges, self._device.type == "cuda")
        for number in range(done, len(self)):
            count = self._shard.valid(number)
            real = torch.full((), count, dtype=torch.int64, device=self._device)
            batch = HostBatch({**self._decoded(number, read), "count": real}, count, number)
            if self.resident:
                self._kept.append(batch)
            yield batch

    def close(self) -> None:
        """Stop the threads, close the file and free the resident batches."""
        self._file.close()
        self._kept.clear()

    def _parts(self, number: int) -> list[tuple[int, int]]:
        """Return the row ranges in which a batch is read: several, so that little pinned memory is needed."""
        samples = self._shard.samples(number)
        step = max(1, PIECE_BYTES // (self._words * WORD))
        return [(first, min(first + step, samples.stop)) for first in range(samples.start, samples.stop, step)]

    def _decoded(self, number: int, read: Iterator[Tensor]) -> dict[str, Tensor]:
        words_BW = torch.zeros((self._shard.batch, self._words), dtype=torch.int32, device=self._device)
        begin = self._shard.samples(number).start
        for first, last in self._parts(number):
            words_BW[first - begin : last - begin].copy_(next(read), non_blocking=True)
        return self._format.decode(words_BW)


def open_evaluation(
    root: Path,
    sample_format: SampleFormat,
    tables: Tables,
    batch: int,
    replicas: int,
    replica: int,
    device: torch.device,
    settings: RowReaderSettings,
) -> ClickEvaluationRows:
    """Open the evaluation data in ``root``. Call it after ``run_start``.

    Args:
        batch: samples of a batch of one replica.
        replicas, replica: number of data-parallel replicas, and index of this one.

    Raises:
        DataError: the folder is incomplete or damaged, or its ids belong to other tables.
        ConfigError: an impossible batch or replica.
    """
    prepared = open_prepared(root, sample_format, tables)
    shard = EvalShard(prepared.eval_samples, batch, replicas, replica)
    file = RowFile(root / sample_format.eval_file, prepared.words, prepared.eval_samples, settings)
    return ClickEvaluationRows(file, sample_format, prepared.words, shard, device, settings.resident_gb)
