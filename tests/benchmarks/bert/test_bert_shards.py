"""Reading one shard: rows and files that are not as they must be."""

import re

import h5py
import numpy as np
import pytest

from benchmarks.bert.shards import ShardFile
from common.errors import DataError
from tests.benchmarks.bert.small_shards import Sample, make_packs, settings, write_packs

PACKS = 48


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    """48 packs of one, two and three sequences."""
    return make_packs([1, 3, 2] * (PACKS // 3))


def rewrite(path, name, row, values):
    """Put ``values`` in place of one row of one dataset."""
    with h5py.File(path, "r+") as file:
        file[name][row] = np.array(values, h5py.check_vlen_dtype(file[name].dtype))


GOOD = {
    "input_ids": [1, 2, 3, 4, 5, 6], "segment_ids": [0, 0, 1, 0, 1, 1], "masked_lm_positions": [1, 4],
    "masked_lm_ids": [7, 8], "packed_input_len": [3, 3], "packed_masked_lm_len": [1, 1],
    "next_sentence_labels": [0, 1],
}  # fmt: skip
LONG = {"input_ids": [1] * 33, "segment_ids": [0] * 33, "packed_input_len": [3, 30]}
BAD_ROWS = {
    "too long": (LONG, "33 tokens where a row holds 1 to 32"),
    "four sequences": (
        {"packed_input_len": [1, 2, 1, 2], "packed_masked_lm_len": [0, 1, 0, 1], "next_sentence_labels": [0, 1, 1, 0]},
        "4 sequences where a row holds 1 to 3",
    ),
    "no sequence": (
        {"packed_input_len": [], "packed_masked_lm_len": [], "next_sentence_labels": []},
        "0 sequences where a row holds 1 to 3",
    ),
    "lengths": ({"packed_input_len": [3, 2]}, "packed_input_len adds up to 5 but there are 6 tokens"),
    "negative length": ({"packed_input_len": [7, -1]}, "a sequence of no tokens"),
    "empty sequence": ({"packed_input_len": [6, 0]}, "a sequence of no tokens"),
    "masked lengths": (
        {"packed_masked_lm_len": [1, 2]}, "packed_masked_lm_len adds up to 3 but there are 2 masked tokens"
    ),
    "negative masked length": ({"packed_masked_lm_len": [3, -1]}, "a negative number of masked tokens"),
    "labels of other sequences": (
        {"next_sentence_labels": [0]}, "packed_input_len of 2 sequences but next_sentence_labels of 1"
    ),
    "masked lengths of other sequences": (
        {"packed_masked_lm_len": [2]}, "packed_masked_lm_len of 1 sequences but next_sentence_labels of 2"
    ),
    "segments": ({"segment_ids": [0]}, "6 token ids but 1 segment ids"),
    "positions": ({"masked_lm_positions": [1]}, "2 masked tokens but 1 positions of them"),
    "too many masked": (
        {"masked_lm_positions": [1, 1, 1, 2, 2, 4, 5], "masked_lm_ids": [7] * 7, "packed_masked_lm_len": [5, 2]},
        "7 masked tokens where a row holds at most 6",
    ),
    "position of another sequence": ({"masked_lm_positions": [1, 2]}, "a masked position outside its sequence"),
    "position beyond": ({"masked_lm_positions": [1, 6]}, "a masked position outside its sequence"),
    "negative id": (
        {"input_ids": [1, 2, 3, -4, 5, 6]}, "input_ids has -4 where the vocabulary's ids are 0 to 4999"
    ),
    "id beyond the vocabulary": (
        {"input_ids": [1, 2, 3, 4, 5, 5000]}, "input_ids has 5000 where the vocabulary's ids are 0 to 4999"
    ),
    "masked id beyond the vocabulary": (
        {"masked_lm_ids": [7, 5000]}, "masked_lm_ids has 5000 where the vocabulary's ids are 0 to 4999"
    ),
    "segment": (
        {"segment_ids": [0, 0, 1, 0, 1, 2]}, "segment_ids has 2 where segment types' ids are 0 to 1"
    ),
    "label": (
        {"next_sentence_labels": [0, 2]}, "next_sentence_labels has 2 where next-sentence labels' ids are 0 to 1"
    ),
}  # fmt: skip


def shard_with(path, packs, row, values):
    write_packs(path, packs)
    for name, of_row in values.items():
        rewrite(path, name, row, of_row)
    return path


def read_file(path, rows, **changes):
    file = ShardFile(path, rows, settings(**changes).training_limits())
    try:
        while file.shard is None:
            file.advance()
    finally:
        file.close()


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, packs, name):
    many = packs * 6  # more rows than one slice
    row = 270
    values, message = BAD_ROWS[name]
    path = shard_with(tmp_path / "shard", many, row, GOOD | values)
    with pytest.raises(DataError, match=re.escape(f"{path}, row {row}: {message}; check the data with")):
        read_file(path, len(many))


def test_the_row_that_the_bad_ones_are_made_of_is_good(tmp_path, packs):
    read_file(shard_with(tmp_path / "shard", packs, 5, GOOD), PACKS)


def test_a_dataset_that_is_missing_is_named(tmp_path, packs):
    write_packs(tmp_path / "shard", packs)
    with h5py.File(tmp_path / "shard", "r+") as file:
        del file["packed_input_len"]
    with pytest.raises(DataError, match="lacks the dataset packed_input_len that packs have"):
        read_file(tmp_path / "shard", PACKS)


def test_a_dataset_of_another_kind_is_named(tmp_path, packs):
    write_packs(tmp_path / "shard", packs)
    with h5py.File(tmp_path / "shard", "r+") as file:
        del file["segment_ids"]
        file["segment_ids"] = np.zeros((PACKS, 32), np.int8)
    with pytest.raises(DataError, match=r"segment_ids is int8 \(48, 32\) where packs have integers of variable"):
        read_file(tmp_path / "shard", PACKS)


def test_a_file_of_another_number_of_rows_is_named(tmp_path, packs):
    write_packs(tmp_path / "shard", packs)
    with pytest.raises(DataError, match="input_ids has 48 rows where 47 belong into this file"):
        read_file(tmp_path / "shard", 47)


def test_packs_are_not_taken_for_single_sequences(tmp_path, packs):
    write_packs(tmp_path / "shard", packs)
    with pytest.raises(DataError, match=r"next_sentence_labels is object .* where single sequences have one integer"):
        read_file(tmp_path / "shard", PACKS, format="unpacked")
