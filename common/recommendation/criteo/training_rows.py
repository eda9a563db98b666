"""Training micro-batches of prepared click logs, in the order of the file.

The order is fixed by the preparation. Every global batch is a contiguous range of rows, and every micro-batch of a
replica is a range inside it. Rows after the last complete global batch are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from common.data.batches import Block, HostBatch
from common.data.order import MicroBatches
from common.errors import ConfigError
from common.recommendation.criteo.prepared import PreparedClicks, open_prepared
from common.recommendation.criteo.row_reader import RowFile, RowReaderSettings
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.tables import Tables


class TrainingRows:
    """Micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    A batch has the tensor ``words`` (B, W) int32 in host memory, for :meth:`SampleFormat.decode` on the device. It
    stays valid until the next batch is requested and the copies queued on the current stream by then are done.

    Args:
        part: this replica's part of every global batch.

    Raises:
        ConfigError: there are fewer samples than a global batch has.
    """

    def __init__(self, prepared: PreparedClicks, file: RowFile, part: MicroBatches, device: torch.device) -> None:
        self.train_samples, self.eval_samples = prepared.train_samples, prepared.eval_samples
        self.synthetic = prepared.manifest.synthetic
        self._file, self._part, self._pinned = file, part, device.type == "cuda"
        self._steps = self.train_samples // (part.micro_batch * part.streams)
        if not self._steps:
            raise ConfigError(
                f"hparams.global_batch_size={part.micro_batch * part.streams}: {prepared.folder} has only "
                f"{self.train_samples} training samples"
            )

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``, up to the last complete global batch."""
        part = self._part
        first = part.first(block)
        last = min(first + part.count(block), self._steps * part.accumulation)
        ranges = [self._rows(number) for number in range(first + start, last)]
        for position, words_BW in enumerate(self._file.read(ranges, self._pinned), start):
            yield HostBatch({"words": words_BW}, part.micro_batch * part.replicas, position)

    def close(self) -> None:
        """Stop the threads and close the file."""
        self._file.close()

    def _rows(self, number: int) -> tuple[int, int]:
        """Return first row and last row + 1 of this replica's micro-batch ``number`` of the whole training."""
        step, accumulation_step = self._part.step_of(number)
        first = (step * self._part.streams + self._part.stream(accumulation_step)) * self._part.micro_batch
        return first, first + self._part.micro_batch


def open_training(
    root: Path,
    sample_format: SampleFormat,
    tables: Tables,
    part: MicroBatches,
    device: torch.device,
    settings: RowReaderSettings,
) -> TrainingRows:
    """Open the training data in ``root``. Call it after ``run_start``.

    Args:
        part: this replica's part of every global batch.

    Raises:
        DataError: the folder is incomplete or damaged, or its ids belong to other tables.
        ConfigError: there are fewer samples than a global batch has.
    """
    prepared = open_prepared(root, sample_format, tables)
    file = RowFile(root / sample_format.train_file, prepared.words, prepared.train_samples, settings)
    return TrainingRows(prepared, file, part, device)
