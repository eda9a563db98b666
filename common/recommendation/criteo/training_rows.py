"""Training micro-batches of prepared click logs, in the order in which they lie on the disk.

The order is fixed when the data are prepared. Every global batch is a contiguous range of rows, every micro-batch of a
replica one inside it; the rows behind the last whole global batch are not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from common.data.batches import Block, HostBatch
from common.data.order import MicroBatches
from common.errors import ConfigError
from common.recommendation.criteo.prepared import Prepared, open_prepared
from common.recommendation.criteo.row_files import ReaderSettings, RowFile
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.tables import Tables


class TrainingRows:
    """Micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    A batch has the tensor ``words`` (B, W) int32 of host memory, for :meth:`SampleFormat.decode` on the device; it
    stays as it is until the next batch is asked for, and what the current stream is then to copy has been copied.

    Args:
        prepared: the data set.
        file: of its training samples.
        mine: this replica's part of every global batch.
        device: where the batches go.

    Raises:
        ConfigError: there are fewer samples than a global batch has.
    """

    def __init__(self, prepared: Prepared, file: RowFile, mine: MicroBatches, device: torch.device) -> None:
        self.train_samples, self.eval_samples = prepared.train_samples, prepared.eval_samples
        self.stand_in = prepared.manifest.stand_in
        self._file, self._mine, self._pinned = file, mine, device.type == "cuda"
        self._steps = self.train_samples // (mine.micro_batch * mine.lanes)
        if not self._steps:
            raise ConfigError(
                f"hparams.global_batch_size={mine.micro_batch * mine.lanes}: {prepared.folder} has only "
                f"{self.train_samples} training samples"
            )

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``, as far as there are whole global batches."""
        mine = self._mine
        first = mine.first(block)
        last = min(first + mine.count(block), self._steps * mine.accumulation)
        ranges = [self._rows(number) for number in range(first + start, last)]
        for position, words_BW in enumerate(self._file.read(ranges, self._pinned), start):
            yield HostBatch({"words": words_BW}, mine.micro_batch * mine.replicas, position)

    def close(self) -> None:
        """Stop the threads and close the file."""
        self._file.close()

    def _rows(self, number: int) -> tuple[int, int]:
        """First row of this replica's micro-batch ``number``, from 0 over the whole training, and that behind it."""
        step, accumulation_step = self._mine.place(number)
        first = (step * self._mine.lanes + self._mine.lane(accumulation_step)) * self._mine.micro_batch
        return first, first + self._mine.micro_batch


def open_training(
    root: Path,
    sample_format: SampleFormat,
    tables: Tables,
    mine: MicroBatches,
    device: torch.device,
    settings: ReaderSettings,
) -> TrainingRows:
    """Open the training data under ``root``; after ``run_start``.

    Args:
        root: prepared data.
        sample_format: of it.
        tables: of the model.
        mine: this replica's part of every global batch.
        device: where the batches go.
        settings: how files are read.

    Raises:
        DataError: the folder is incomplete or damaged, or its ids are those of other tables.
        ConfigError: there are fewer samples than a global batch has.
    """
    prepared = open_prepared(root, sample_format, tables)
    file = RowFile(root / sample_format.train_file, prepared.words, prepared.train_samples, settings)
    return TrainingRows(prepared, file, mine, device)
