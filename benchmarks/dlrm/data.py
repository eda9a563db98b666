"""DLRM's data: prepared click logs with one id of each table and counts, 160 bytes a sample."""

from __future__ import annotations

from pathlib import Path

from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.recommendation.criteo import evaluation_rows, training_rows
from common.recommendation.criteo.evaluation_rows import EvaluationRows
from common.recommendation.criteo.row_files import ReaderSettings
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.training_rows import TrainingRows
from common.recommendation.tables import Tables

FORMAT = SampleFormat(
    name="dlrm-criteo/1",
    logarithms=False,
    train_file="train_data.bin",
    eval_file="test_data.bin",
    command="mlperf-suite prepare benchmark=dlrm --raw-dir RAW --data-dir DATA",
)


def open_training(
    root: Path, tables: Tables, layout: Layout, micro_batch: int, accumulation: int, settings: ReaderSettings
) -> TrainingRows:
    """Open the training data for this rank; after ``run_start``. Its batches are for ``FORMAT.decode``.

    Args:
        root: prepared data.
        tables: of the model.
        layout: the replica (axis dp) and the device.
        micro_batch: samples of a micro-batch of one replica.
        accumulation: micro-batches per step of a replica.
        settings: how files are read.

    Raises:
        DataError: the folder is incomplete or damaged, or its ids are those of other tables.
        ConfigError: there are fewer samples than a global batch has.
    """
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    return training_rows.open_training(root, FORMAT, tables, mine, layout.device, settings)


def open_evaluation(root: Path, tables: Tables, layout: Layout, batch: int, settings: ReaderSettings) -> EvaluationRows:
    """Open the evaluation data for this rank; after ``run_start``.

    Args:
        root: prepared data.
        tables: of the model.
        layout: the replica (axis dp) and the device.
        batch: samples of a batch of one replica.
        settings: how files are read, and whether batches stay on the device.

    Raises:
        DataError: the folder is incomplete or damaged, or its ids are those of other tables.
    """
    size, index = layout.size("dp"), layout.index("dp")
    return evaluation_rows.open_evaluation(root, FORMAT, tables, batch, size, index, layout.device, settings)
