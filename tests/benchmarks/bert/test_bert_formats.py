"""The files on disk, dataset by dataset, read with h5py alone."""

import h5py
import numpy as np
import pytest

from benchmarks.bert.preparation import hdf5, sequence_exchange
from benchmarks.bert.sequences import Sequences, concatenate
from common.data.shard_streams import shard_sizes
from common.errors import DataError


def sequences(lengths, seed=0):
    """Random sequences; every fifth token of each is masked."""
    source = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int32)
    positions = [np.arange(1, length - 1, 5) for length in lengths]
    masked = np.array([len(places) for places in positions], np.int32)
    first = [source.integers(2, length) for length in lengths]
    return Sequences(
        lengths,
        source.integers(1, 30_000, lengths.sum()).astype(np.int16),
        np.concatenate([(np.arange(n) >= a).astype(np.int8) for n, a in zip(lengths, first, strict=True)]),
        masked,
        np.concatenate(positions).astype(np.int16),
        source.integers(1, 30_000, masked.sum()).astype(np.int16),
        source.integers(0, 2, len(lengths)).astype(np.int8),
    )


def rows(sequences):
    """Every sequence as plain lists."""
    tokens, masked = np.cumsum(sequences.lengths)[:-1], np.cumsum(sequences.masked_lengths)[:-1]
    columns = (
        np.split(sequences.input_ids, tokens),
        np.split(sequences.segment_ids, tokens),
        np.split(sequences.masked_lm_positions, masked),
        np.split(sequences.masked_lm_ids, masked),
    )
    return [
        (*(column[row].tolist() for column in columns), int(sequences.next_sentence_labels[row]))
        for row in range(len(sequences))
    ]


def test_fixed_files_have_nvidia_s_columns_padded_with_zeros(tmp_path):
    made = sequences([7, 16, 9])
    hdf5.write_fixed(tmp_path / "f.hdf5", made, 16, 4)
    with h5py.File(tmp_path / "f.hdf5") as file:
        found = {name: (file[name].dtype, file[name].shape) for name in file}
        content = {name: file[name][:] for name in file}
    assert found == {
        "input_ids": (np.int16, (3, 16)),
        "input_mask": (np.int8, (3, 16)),
        "segment_ids": (np.int8, (3, 16)),
        "masked_lm_positions": (np.int16, (3, 4)),
        "masked_lm_ids": (np.int16, (3, 4)),
        "next_sentence_labels": (np.int8, (3,)),
    }
    for row, (ids, segments, positions, labels, following) in enumerate(rows(made)):
        assert content["input_ids"][row].tolist() == ids + [0] * (16 - len(ids))
        assert content["input_mask"][row].tolist() == [1] * len(ids) + [0] * (16 - len(ids))
        assert content["segment_ids"][row].tolist() == segments + [0] * (16 - len(ids))
        assert content["masked_lm_positions"][row].tolist() == positions + [0] * (4 - len(positions))
        assert content["masked_lm_ids"][row].tolist() == labels + [0] * (4 - len(positions))
        assert content["next_sentence_labels"][row] == following


def test_fixed_files_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "FIXED_ROWS", 3)
    made = sequences([7, 16, 9, 5, 12, 3, 8])
    hdf5.write_fixed(tmp_path / "f.hdf5", made, 16, 4)
    pieces = list(hdf5.read_fixed(tmp_path / "f.hdf5"))
    assert [len(piece) for piece in pieces] == [3, 3, 1]
    assert rows(concatenate(pieces)) == rows(made)


@pytest.mark.parametrize("lengths", [[7, 16, 9, 5], [8, 8, 8], [8]])
def test_varlength_files_hold_one_sequence_a_row(tmp_path, lengths):
    made = sequences(lengths)
    hdf5.write_varlength(tmp_path / "v.hdf5", made)
    with h5py.File(tmp_path / "v.hdf5") as file:
        kinds = {name: h5py.check_vlen_dtype(file[name].dtype) or file[name].dtype for name in file}
        assert {file[name].shape for name in file} == {(len(lengths),)}
        found = [
            (
                *(file[name][row].tolist() for name in (
                    "input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"
                )),
                int(file["next_sentence_labels"][row]),
            )
            for row in range(len(lengths))
        ]  # fmt: skip
    assert kinds == {
        "input_ids": np.int16, "segment_ids": np.int8, "masked_lm_positions": np.int16, "masked_lm_ids": np.int16,
        "next_sentence_labels": np.int8,
    }  # fmt: skip
    assert found == rows(made)
    assert rows(hdf5.read_varlength(tmp_path / "v.hdf5")) == rows(made)


def test_packed_files_hold_sequences_back_to_back(tmp_path):
    made = sequences([7, 16, 9, 5, 12, 6])
    hdf5.write_packed(tmp_path / "p", made, np.array([2, 1, 3]))
    with h5py.File(tmp_path / "p") as file:
        assert {name: h5py.check_vlen_dtype(file[name].dtype) for name in file} == {
            "input_ids": np.int16, "segment_ids": np.int8, "masked_lm_positions": np.int16, "masked_lm_ids": np.int16,
            "packed_input_len": np.int16, "packed_masked_lm_len": np.int16, "next_sentence_labels": np.int8,
        }  # fmt: skip
        content = {name: [row.tolist() for row in file[name][:]] for name in file}
    single = rows(made)
    for row, members in enumerate(([0, 1], [2], [3, 4, 5])):
        ids, segments, positions, labels = [], [], [], []
        for member in members:
            positions += [len(ids) + position for position in single[member][2]]
            ids += single[member][0]
            segments += single[member][1]
            labels += single[member][3]
        assert content["input_ids"][row] == ids
        assert content["segment_ids"][row] == segments
        assert content["masked_lm_positions"][row] == positions
        assert content["masked_lm_ids"][row] == labels
        assert content["packed_input_len"][row] == [len(single[member][0]) for member in members]
        assert content["packed_masked_lm_len"][row] == [len(single[member][2]) for member in members]
        assert content["next_sentence_labels"][row] == [single[member][4] for member in members]
    assert hdf5.pack_sizes_of(tmp_path / "p").tolist() == [2, 1, 3]


def test_empty_files_can_be_written_and_read(tmp_path):
    none = sequences([5]).take(np.zeros(0, np.int64))
    hdf5.write_varlength(tmp_path / "v.hdf5", none)
    hdf5.write_packed(tmp_path / "p", none, np.zeros(0, np.int64))
    hdf5.write_fixed(tmp_path / "f.hdf5", none, 16, 4)
    assert len(hdf5.read_varlength(tmp_path / "v.hdf5")) == 0
    assert list(hdf5.read_fixed(tmp_path / "f.hdf5")) == []


def test_taking_rows_in_blocks_is_taking_them(monkeypatch):
    made = sequences([7, 16, 9, 5, 12, 6])
    everything = rows(made)
    monkeypatch.setattr("common.data.ragged._BLOCK", 2)
    assert rows(made.take(np.array([5, 0, 0, 3, 2]))) == [everything[row] for row in (5, 0, 0, 3, 2)]


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_exchange_brings_every_sequence_to_its_shard_in_order(tmp_path, shards):
    made = sequences(np.random.default_rng(0).integers(3, 20, 20).tolist())
    slots = np.random.default_rng(1).permutation(40)[:20].astype(np.int32)
    slots[4] = -1
    boundaries = np.concatenate([[0], np.cumsum(shard_sizes(40, shards, larger_first=True))])
    paths = [tmp_path / f"part-{number}" for number in range(2)]
    for number, path in enumerate(paths):
        half = np.arange(10 * number, 10 * number + 10)
        pieces = [made.take(half[:4]), made.take(half[4:])]
        sequence_exchange.scatter(pieces, slots[half], boundaries, path)
    found = []
    for shard in range(shards):
        own, group = sequence_exchange.gather(paths, shard, shards)
        assert ((own >= boundaries[shard]) & (own < boundaries[shard + 1])).all()
        found += list(zip(own.tolist(), rows(group), strict=True))
    expected = [(int(slot), row) for slot, row in zip(slots, rows(made), strict=True) if slot >= 0]
    assert found == sorted(expected)


def test_shards_differ_by_one_row_at_most():
    assert shard_sizes(11, 4, larger_first=True).tolist() == [3, 3, 3, 2]
    assert shard_sizes(11, 4, larger_first=False).tolist() == [2, 3, 3, 3]
    packed = shard_sizes(78_404_631, 4320, larger_first=True)
    assert packed.tolist() == [78_404_631 // 4320 + (n < 951) for n in range(4320)]


@pytest.mark.parametrize("damage", ["missing", "truncated", "text", "column"])
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "x.hdf5"
    if damage == "truncated":
        hdf5.write_fixed(path, sequences([16] * 500), 16, 4)
        path.write_bytes(path.read_bytes()[:-9000])
    elif damage == "text":
        path.write_text("not HDF5")
    elif damage == "column":
        hdf5.write_varlength(path, sequences([7, 8]))
    with pytest.raises(DataError, match=r"x\.hdf5"):
        list(hdf5.read_fixed(path))


def test_a_truncated_exchange_file_is_named(tmp_path):
    sequence_exchange.scatter(
        [sequences([7, 8, 9])], np.arange(3, dtype=np.int32), np.array([0, 2, 3]), tmp_path / "part"
    )
    (tmp_path / "part").write_bytes((tmp_path / "part").read_bytes()[:-5])
    sequence_exchange.gather([tmp_path / "part"], 0, 2)
    with pytest.raises(DataError, match="part is truncated"):
        sequence_exchange.gather([tmp_path / "part"], 1, 2)


def test_a_packed_file_does_not_pass_as_unpacked_nor_the_other_way_round(tmp_path):
    hdf5.write_varlength(tmp_path / "v", sequences([7]))
    hdf5.write_packed(tmp_path / "p", sequences([7]), np.array([1]))
    with pytest.raises(DataError, match="holds packs where single sequences are needed"):
        hdf5.read_varlength(tmp_path / "p")
    with pytest.raises(DataError, match="holds no packs"):
        hdf5.pack_sizes_of(tmp_path / "v")
