"""The reader of prepared click logs: which rows each rank gets, in which order, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.data import manifest
from common.data.batches import Block
from common.data.manifest import Manifest
from common.data.order import MicroBatches
from common.errors import ConfigError, DataError
from common.recommendation.criteo import evaluation_rows
from common.recommendation.criteo.evaluation_rows import open_evaluation
from common.recommendation.criteo.row_reader import RowReaderSettings
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.training_rows import open_training
from common.recommendation.tables import Table, Tables

LOGARITHMS = SampleFormat("multi-hot/1", True, "train_data.bin", "val_data.bin", "prepare")
COUNTS = replace(LOGARITHMS, logarithms=False)
TABLES = Tables((Table("a", 50, 3), Table("b", 7, 1), Table("c", 9, 12)), 4)
WORDS = 14 + 16
TRAIN, EVAL = 1037, 203
CPU = torch.device("cpu")
EVERY_WAY = [
    RowReaderSettings(files="auto", ahead=2),
    RowReaderSettings(files="mapped"),
    RowReaderSettings(files="buffered"),
]


def made_rows(count, seed):
    random = np.random.default_rng(seed)
    rows = random.integers(0, 7, (count, WORDS)).astype(np.int32)
    rows[:, 0] = random.integers(0, 2, count)
    rows[:, 1:14] = random.standard_normal((count, 13)).astype(np.float32).view(np.int32)
    return rows


def describe(folder, **changes):
    files = manifest.describe_files(folder, ["train_data.bin", "val_data.bin"])
    source = {"table_rows": json.dumps([50, 7, 9]), "hotness": json.dumps([3, 1, 12])}
    made = Manifest(LOGARITHMS.name, files, {"train_samples": TRAIN, "eval_samples": EVAL}, True, source)
    manifest.write(folder, replace(made, **changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    train, evaluation = made_rows(TRAIN, 0), made_rows(EVAL, 1)
    train.tofile(folder / "train_data.bin")
    evaluation.tofile(folder / "val_data.bin")
    describe(folder)
    return folder, train, evaluation


def block_of(first, samples):
    return Block(0, 1, 0, first, samples)


def taken(source, block, start=0):
    """Positions and rows of a block."""
    return [(batch.position, batch.tensors["words"].numpy().copy()) for batch in source.batches(block, start)]


@pytest.mark.parametrize("settings", EVERY_WAY, ids=lambda settings: settings.files)
@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_get_contiguous_slices_of_each_global_batch_in_the_order_of_the_disk(data, settings, replicas):
    folder, train, _ = data
    # 60 samples a step: of one rank 4 micro-batches, of two ranks 2 each.
    found = {}
    for replica in range(replicas):
        mine = MicroBatches(15, 4 // replicas, replicas, replica)
        source = open_training(folder, LOGARITHMS, TABLES, mine, CPU, settings)
        assert (source.train_samples, source.eval_samples, source.synthetic) == (TRAIN, EVAL, True)
        for number, (first, samples) in enumerate(((0, 480), (480, 600))):  # the second reaches beyond the last step
            for position, rows in taken(source, block_of(first, samples)):
                step, accumulation_step = divmod(position, 4 // replicas)
                found[number * 8 + step, accumulation_step * replicas + replica] = rows
        source.close()
    assert sorted(found) == [(step, micro_batch) for step in range(TRAIN // 60) for micro_batch in range(4)]
    np.testing.assert_array_equal(np.concatenate([found[key] for key in sorted(found)]), train[: TRAIN // 60 * 60])


@pytest.mark.parametrize("settings", EVERY_WAY, ids=lambda settings: settings.files)
def test_a_position_resumes_exactly(data, settings):
    source = open_training(data[0], LOGARITHMS, TABLES, MicroBatches(7, 2), CPU, settings)
    whole = taken(source, block_of(140, 280))
    assert [position for position, _ in whole] == list(range(40))
    begun = source.batches(block_of(140, 280))
    next(begun)  # what is given up half-way leaves nothing behind
    for start in (13, 39, 40):
        again = taken(source, block_of(140, 280), start)
        assert [position for position, _ in again] == list(range(start, 40))
        for (_, rows), (_, expected) in zip(again, whole[start:], strict=True):
            np.testing.assert_array_equal(rows, expected)
    source.close()


def test_rows_are_taken_apart_into_memory_of_their_own():
    words = torch.from_numpy(made_rows(5, 3))
    batch = LOGARITHMS.decode(words)
    kept = words.clone()
    words.zero_()
    assert batch["label"].dtype == batch["dense"].dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in batch.values())
    np.testing.assert_array_equal(batch["label"].numpy(), kept[:, 0].numpy())
    assert batch["dense"].numpy().tobytes() == kept[:, 1:14].contiguous().numpy().tobytes()
    np.testing.assert_array_equal(batch["ids"].numpy(), kept[:, 14:].numpy(), strict=True)


def test_counts_become_the_logarithm_of_one_more():
    words = torch.from_numpy(np.random.default_rng(0).integers(0, 2**31 - 1, (6, WORDS)).astype(np.int32))
    words[0, 1:14] = torch.arange(13)
    dense = COUNTS.decode(words)["dense"].double()
    torch.testing.assert_close(dense, torch.log(words[:, 1:14].double() + 1), rtol=3e-7, atol=0)


@pytest.mark.parametrize("resident_gb", [0.0, 1.0])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_evaluation_sample_is_seen_once_and_padding_is_counted_out(data, replicas, resident_gb, monkeypatch):
    monkeypatch.setattr(evaluation_rows, "PIECE_BYTES", 13 * 4 * WORDS)  # a batch is some parts of 13 rows
    folder, _, evaluation = data
    found = []
    for replica in range(replicas):
        settings = RowReaderSettings(resident_gb=resident_gb, ahead=2)
        source = open_evaluation(folder, LOGARITHMS, TABLES, 50, replicas, replica, CPU, settings)
        passes = [list(source), list(source)]
        assert source.eval_samples == EVAL
        assert all(len(batches) == len(source) == (5 if replicas == 1 else 2) for batches in passes)
        for first, second in zip(*passes, strict=True):
            assert first.tensors["ids"].shape == (50, 16)
            for name, tensor in first.tensors.items():
                assert torch.equal(tensor, second.tensors[name])
                assert (tensor.data_ptr() == second.tensors[name].data_ptr()) == source.resident
            count = int(first.tensors["count"])
            assert count == first.samples
            assert not first.tensors["ids"][count:].any()
            found.append(first.tensors["ids"][:count].numpy())
        assert source.resident == (resident_gb == 1)
        source.close()
    np.testing.assert_array_equal(np.concatenate(found), evaluation[:, 14:])


def test_a_rank_without_samples_has_batches_of_padding(data):
    source = open_evaluation(data[0], LOGARITHMS, TABLES, 1, EVAL + 1, 0, CPU, RowReaderSettings())
    (batch,) = source
    assert int(batch.tensors["count"]) == 0
    assert not batch.tensors["label"].any()
    source.close()


def test_what_is_resident_is_not_read_again(data, monkeypatch):
    source = open_evaluation(data[0], LOGARITHMS, TABLES, 50, 1, 0, CPU, RowReaderSettings(resident_gb=1))
    half = iter(source)
    next(half), next(half)
    half.close()
    assert len(list(source)) == 5
    monkeypatch.setattr(source._file, "read", lambda *arguments: pytest.fail("read again"))
    assert len(list(source)) == 5


@pytest.fixture
def damaged(data, tmp_path):
    data[1].tofile(tmp_path / "train_data.bin")
    data[2].tofile(tmp_path / "val_data.bin")
    describe(tmp_path)
    return tmp_path


def opened(folder, tables=TABLES, micro_batch=10):
    return open_training(folder, LOGARITHMS, tables, MicroBatches(micro_batch), CPU, RowReaderSettings())


def test_a_category_outside_its_table_is_refused(damaged):
    tables = Tables((*TABLES.tables[:2], Table("c", 8, 12)), 4)
    with pytest.raises(DataError, match=r"has category 8 of table c, which has 8 rows") as raised:
        opened(damaged, tables)
    assert "benchmark.facts.table_rows" in str(raised.value)
    largest = max(table.rows for table in tables.tables)
    assert f"'{LOGARITHMS.command} --table-cap {largest}'" in str(raised.value)


def test_ids_of_other_tables_are_refused(damaged):
    tables = Tables((*TABLES.tables[:2], Table("c", 9, 11)), 4)
    with pytest.raises(DataError, match=r"has \[3, 1, 12\] ids of each table, and the model takes \[3, 1, 11\]"):
        opened(damaged, tables)


def test_a_file_that_is_no_multiple_of_its_row_is_refused(damaged):
    with open(damaged / "train_data.bin", "ab") as file:
        file.write(b"1234")
    with pytest.raises(DataError, match=r"has 124444 bytes where manifest.json says 124440"):
        opened(damaged)
    describe(damaged)
    with pytest.raises(DataError, match=r"train_data.bin has 124,444 bytes, no whole number of rows of 120"):
        opened(damaged)


def test_a_file_of_another_number_of_rows_is_refused(damaged):
    describe(damaged, counts={"train_samples": TRAIN - 1, "eval_samples": EVAL})
    with pytest.raises(DataError, match=r"train_data.bin has 1,037 rows where .*manifest.json says 1,036"):
        opened(damaged)


def test_a_manifest_without_tables_is_refused(damaged):
    describe(damaged, source={"hotness": "[3, 1, 12]"})
    with pytest.raises(DataError, match=r"has no valid 'table_rows'; run 'prepare'"):
        opened(damaged)


def test_a_global_batch_beyond_the_data_is_refused(damaged):
    with pytest.raises(ConfigError, match=r"global_batch_size=1038: .* has only 1037 training samples"):
        opened(damaged, micro_batch=1038)


def test_a_file_that_becomes_shorter_is_one_error(damaged):
    source = opened(damaged)
    with open(damaged / "train_data.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"had 124,440 bytes when it was opened"):
        taken(source, block_of(0, 1000))
