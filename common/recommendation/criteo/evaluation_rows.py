"""The evaluation samples of prepared click logs, in batches of one size on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.data.batches import HostBatch
from common.data.order import EvalShard
from common.recommendation.criteo.prepared import open_prepared
from common.recommendation.criteo.row_files import ReaderSettings, RowFile
from common.recommendation.criteo.sample_rows import WORD, SampleFormat
from common.recommendation.tables import Tables


class EvaluationRows:
    """Evaluation batches of one replica; a :class:`common.data.batches.EvalSource`. Iterate once per evaluation.

    A batch has ``label`` (B,), ``dense`` (B, D) and ``ids`` (B, L), as :meth:`SampleFormat.decode` makes them, and
    ``count``, 0-d int64: the first ``count`` samples are real, the others padding, whose words are all 0.

    Args:
        file: of the evaluation samples.
        sample_format: of its rows.
        words: of a row.
        shard: this replica's part.
        device: of the batches.
        resident_gb: see :class:`ReaderSettings`.

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
        shard, done = self._shard, len(self._kept)
        filled = [
            (samples.start, samples.stop) for samples in map(shard.samples, range(done, len(self))) if len(samples)
        ]
        read = self._file.read(filled, self._device.type == "cuda") if done < len(self) else iter(())
        for number in range(done, len(self)):
            count = shard.valid(number)
            batch = HostBatch(self._decoded(next(read) if count else None, count), count, number)
            if self.resident:
                self._kept.append(batch)
            yield batch

    def close(self) -> None:
        """Stop the threads, close the file and free what was kept."""
        self._file.close()
        self._kept.clear()

    def _decoded(self, words_NW: Tensor | None, count: int) -> dict[str, Tensor]:
        words_BW = torch.zeros((self._shard.batch, self._words), dtype=torch.int32, device=self._device)
        if words_NW is not None:
            words_BW[:count].copy_(words_NW, non_blocking=True)
        real = torch.full((), count, dtype=torch.int64, device=self._device)
        return {**self._format.decode(words_BW), "count": real}


def open_evaluation(
    root: Path,
    sample_format: SampleFormat,
    tables: Tables,
    batch: int,
    replicas: int,
    replica: int,
    device: torch.device,
    settings: ReaderSettings,
) -> EvaluationRows:
    """Open the evaluation data under ``root``; after ``run_start``.

    Args:
        root: prepared data.
        sample_format: of it.
        tables: of the model.
        batch: samples of a batch of one replica.
        replicas, replica: number of data-parallel replicas, and this one, from 0.
        device: of the batches.
        settings: how files are read, and whether batches stay on the device.

    Raises:
        DataError: the folder is incomplete or damaged, or its ids are those of other tables.
        ConfigError: an impossible batch or replica.
    """
    prepared = open_prepared(root, sample_format, tables)
    shard = EvalShard(prepared.eval_samples, batch, replicas, replica)
    file = RowFile(root / sample_format.eval_file, prepared.words, prepared.eval_samples, settings)
    return EvaluationRows(file, sample_format, prepared.words, shard, device, settings.resident_gb)
