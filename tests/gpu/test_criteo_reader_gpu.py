"""Prepared click logs on a GPU: batches that are copied late are those of the file, and resident ones stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import manifest
from common.data.batches import Block
from common.data.manifest import Manifest
from common.data.order import MicroBatches
from common.recommendation.criteo.evaluation_rows import open_evaluation
from common.recommendation.criteo.row_reader import RowReaderSettings
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.training_rows import open_training
from common.recommendation.tables import Table, Tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FORMAT = SampleFormat("multi-hot/1", True, "train_data.bin", "val_data.bin", "prepare")
TABLES = Tables(tuple(Table(f"{k}", 1000, hotness) for k, hotness in enumerate((100, 27, 12, 75))), 128)
WORDS = 228
TRAIN, EVAL, BATCH = 60 * 512 + 77, 20_011, 512


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    for name, count in (("train_data.bin", TRAIN), ("val_data.bin", EVAL)):
        random.integers(0, 1000, (count, WORDS)).astype(np.int32).tofile(folder / name)
    source = {"table_rows": "[1000, 1000, 1000, 1000]", "hotness": "[100, 27, 12, 75]"}
    files = manifest.describe_files(folder, ["train_data.bin", "val_data.bin"])
    counts = {"train_samples": TRAIN, "eval_samples": EVAL}
    manifest.write(folder, Manifest(FORMAT.name, files, counts, True, source))
    return folder


@pytest.mark.parametrize("files", ["auto", "buffered", "mapped"])
@pytest.mark.parametrize("late", [False, True])
def test_batches_of_a_side_stream_are_those_of_the_file(data: Path, files: str, late: bool) -> None:
    settings = RowReaderSettings(files=files, ahead=1)  # type: ignore[arg-type]
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    source = open_training(data, FORMAT, TABLES, MicroBatches(BATCH), device, settings)
    found = []
    with torch.cuda.stream(stream):
        for batch in source.batches(Block(0, 1, 0, 0, TRAIN)):
            if late:
                torch.cuda._sleep(2_000_000)  # about a millisecond, in which the next batches would be read
            words = batch.tensors["words"]
            assert words.is_pinned() == (files != "mapped")
            found.append(FORMAT.decode(words.to(device, non_blocking=True)))
    torch.cuda.synchronize()
    source.close()
    expected = np.fromfile(data / "train_data.bin", np.int32).reshape(-1, WORDS)[: 60 * BATCH]
    ids = torch.cat([batch["ids"] for batch in found]).cpu().numpy()
    dense = torch.cat([batch["dense"] for batch in found]).cpu().numpy()
    np.testing.assert_array_equal(ids, expected[:, 14:])
    np.testing.assert_array_equal(dense.view(np.int32), expected[:, 1:14])


def test_resident_batches_stay_on_the_device(data: Path) -> None:
    settings = RowReaderSettings(resident_gb=1.0)
    source = open_evaluation(data, FORMAT, TABLES, 4096, 1, 0, torch.device("cuda"), settings)
    first, second = list(source), list(source)
    assert [batch.samples for batch in first] == [4096] * 4 + [EVAL - 4 * 4096]
    assert all(batch.tensors["ids"].is_cuda for batch in first)
    assert [a.tensors["ids"].data_ptr() for a in first] == [b.tensors["ids"].data_ptr() for b in second]
    expected = np.fromfile(data / "val_data.bin", np.int32).reshape(-1, WORDS)[:, 14:]
    ids = torch.cat([batch.tensors["ids"][: batch.samples] for batch in second]).cpu().numpy()
    np.testing.assert_array_equal(ids, expected)
    source.close()
