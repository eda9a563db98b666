"""Rows of tokens as micro-batches: shares of ranks, continuing, the evaluation, and damaged rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.data.batches import Block
from common.data.megatron.indexed import bin_of, indexed_writer
from common.data.megatron.source import (
    RowShape,
    RowStream,
    eval_source,
    example,
    open_blend,
    open_in_order,
    train_source,
)
from common.data.order import EvalShard, MicroBatches
from common.errors import ConfigError, DataError

SHAPE = RowShape(row_length=8, vocabulary=1000, extra_token=True)
CUT = RowShape(row_length=8, vocabulary=1000, extra_token=False)


def write(prefix: Path, tokens: int, seed: int = 0) -> np.ndarray:
    """Documents of 0 to 30 tokens; returns them one behind the other."""
    random = np.random.default_rng(seed)
    stream = random.integers(0, 1000, tokens)
    with indexed_writer(prefix, 1000) as writer:
        first = 0
        while first < tokens:
            length = int(random.integers(0, 31))
            writer.add(stream[first : first + length])
            first += length
    return stream


def taken(rows, shape, block, *, micro_batch=2, accumulation=1, replicas=1, replica=0, start=0, consumed=0, there=96):
    mine = MicroBatches(micro_batch, accumulation, replicas, replica)
    source = train_source(rows, shape, RowStream(mine, there, consumed), 4, synthetic=True)
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


def test_a_row_in_order_is_a_cut_of_the_stream(tmp_path):
    stream = write(tmp_path / "x", 203)
    rows = open_in_order(tmp_path / "x", SHAPE, keep_partial=False)
    row = np.full(9, -1, np.int32)
    for number in range(25):  # (203 - 1) / 8
        rows.read(number, row)
        assert row.tolist() == stream[8 * number : 8 * number + 9].tolist()
    assert len(rows) == 25
    assert rows.scored() == 25 * 8


@pytest.mark.parametrize(("tokens", "last", "scored"), [(203, 3, 25 * 7 + 2), (200, 8, 25 * 7), (201, 1, 25 * 7)])
def test_rows_without_an_extra_token_include_the_last_partial_row(tmp_path, tokens, last, scored):
    """Seven labels a row of eight; what is left after 25 rows makes a shorter one."""
    stream = write(tmp_path / "x", tokens)
    rows = open_in_order(tmp_path / "x", CUT, keep_partial=True)
    row = np.full(9, -1, np.int32)
    rows.read(len(rows) - 1, row)

    assert row.tolist() == [*stream[len(stream) - last :].tolist(), *[-1] * (9 - last)]
    assert rows.scored() == scored


def test_labels_of_an_evaluation_are_counted_as_gpt3s_are(tmp_path):
    """5,661 rows of 2,047 labels and one of 1,937 are 11,590,004."""
    with indexed_writer(tmp_path / "x", 50257) as writer:
        for document in np.array_split(np.zeros(11_595_666, np.uint16), 200):
            writer.add(document)
    rows = open_in_order(tmp_path / "x", RowShape(2048, 50257, extra_token=False), keep_partial=True)

    assert (len(rows), rows.scored()) == (5662, 11_590_004)


@pytest.mark.parametrize("shape", [SHAPE, CUT])
def test_ranks_read_what_one_reads_that_accumulates(tmp_path, shape):
    write(tmp_path / "x", 500)
    rows = open_blend([tmp_path / "x"], [1.0], shape, 96, seed=3, shuffle_documents=True)
    block = Block(1, 1, 0, 24, 36)  # two global batches of 12 came before, three are in it
    alone = taken(rows, shape, block, accumulation=6)
    shared = [taken(rows, shape, block, accumulation=2, replicas=3, replica=replica) for replica in range(3)]

    assert [len(batches) for batches in (alone, *shared)] == [18, 6, 6, 6]
    for number, batch in enumerate(alone):
        other = shared[number % 3][number // 3]
        assert torch.equal(batch.tensors["tokens"], other.tensors["tokens"])
        assert (batch.position, other.position, batch.samples, other.samples) == (number, number // 3, 2, 6)
    positions = np.full((36, 9), -1, np.int32)
    for number, row in enumerate(positions):
        rows.read(24 + number, row)
    assert torch.cat([batch.tensors["tokens"] for batch in alone]).tolist() == positions.tolist()


def test_continuing_gives_the_tail(tmp_path):
    write(tmp_path / "x", 500)
    rows = open_blend([tmp_path / "x"], [1.0], SHAPE, 96, seed=3, shuffle_documents=True)
    block = Block(0, 1, 0, 0, 24)
    whole, tail = taken(rows, SHAPE, block), taken(rows, SHAPE, block, start=7)

    assert [batch.position for batch in tail] == [7, 8, 9, 10, 11]
    for batch, again in zip(whole[7:], tail, strict=True):
        assert torch.equal(batch.tensors["tokens"], again.tensors["tokens"])


def test_rows_that_an_earlier_training_used_are_passed_over(tmp_path):
    write(tmp_path / "x", 500)
    rows = open_blend([tmp_path / "x"], [1.0], SHAPE, 96, seed=3, shuffle_documents=True)
    later = taken(rows, SHAPE, Block(0, 1, 0, 0, 8), consumed=16)
    expected = taken(rows, SHAPE, Block(2, 1, 0, 16, 8))

    for batch, other in zip(later, expected, strict=True):
        assert torch.equal(batch.tensors["tokens"], other.tensors["tokens"])


def test_a_training_beyond_its_rows_is_an_error(tmp_path):
    write(tmp_path / "x", 500)
    rows = open_blend([tmp_path / "x"], [1.0], SHAPE, 10, seed=3, shuffle_documents=True)

    assert len(taken(rows, SHAPE, Block(0, 1, 0, 0, 10), there=10)) == 5
    with pytest.raises(DataError, match="the training wants row 11 of 10; let the recipe ask for more rows"):
        taken(rows, SHAPE, Block(0, 1, 0, 0, 12), there=10)


def test_an_epoch_has_every_row_once_and_the_next_one_goes_on(tmp_path):
    """Documents in their order: rows of two epochs, 62 and half a row, are those of the stream that is put twice."""
    stream = write(tmp_path / "x", 500)
    rows = open_blend([tmp_path / "x"], [1.0], CUT, 125, seed=3, shuffle_documents=False)
    found = np.concatenate(
        [batch.tensors["tokens"].numpy() for batch in taken(rows, CUT, Block(0, 1, 0, 0, 124), there=125)]
    )
    twice = np.concatenate([stream, stream])

    assert len(rows) == 125
    expected = {tuple(twice[8 * row : 8 * row + 8]) for row in range(125)}
    assert len({tuple(row[:8]) for row in found} & expected) == 124
    assert set(found[:, 8]) == {-1}


def test_a_blend_takes_turns(tmp_path):
    prefixes = [tmp_path / "half.6", tmp_path / "half.7"]
    halves = [write(prefix, 500, seed) for seed, prefix in enumerate(prefixes)]
    rows = open_blend(prefixes, [0.5, 0.5], CUT, 60, seed=9, shuffle_documents=False)
    orders = [np.arange(62, dtype=np.uint32) for _ in halves]
    row = np.full(9, -1, np.int32)
    for order in orders:
        np.random.RandomState(9).shuffle(order)
    for position in range(60):
        rows.read(position, row)
        number = orders[position % 2][position // 2]
        assert row[:8].tolist() == halves[position % 2][8 * number : 8 * number + 8].tolist()
    assert len(rows) == 60


def test_a_blend_needs_a_weight_for_each_file(tmp_path):
    with pytest.raises(ConfigError, match="1 files and 2 weights"):
        open_blend([tmp_path / "x"], [0.5, 0.5], CUT, 60, seed=9, shuffle_documents=False)


@pytest.mark.parametrize("replicas", [1, 3])
def test_an_evaluation_has_every_row_once_and_fills_its_batches_up(tmp_path, replicas):
    stream = write(tmp_path / "x", 203)
    rows = open_in_order(tmp_path / "x", SHAPE, keep_partial=False)
    found, sizes = [], set()
    for replica in range(replicas):
        source = eval_source(rows, SHAPE, EvalShard(20, 3, replicas, replica))
        batches = list(source)
        source.close()
        assert source.eval_samples == 20
        sizes.add((len(batches), len(source)))
        for batch in batches:
            tokens, present = batch.tensors["tokens"], batch.tensors["present"]
            assert tokens.shape == (3, 9)
            assert (tokens[~present] == -1).all()
            found += tokens[present].tolist()
    assert found == [stream[8 * row : 8 * row + 9].tolist() for row in range(20)]
    assert len(sizes) == 1


def test_a_token_beyond_the_vocabulary_is_named_by_file_and_sequence(tmp_path):
    with indexed_writer(tmp_path / "x", 1000) as writer:
        writer.add(range(10))
        writer.add([7, 999, 7, 7, 7, 7, 7, 7])
    rows = open_in_order(tmp_path / "x", RowShape(8, 999, extra_token=False), keep_partial=False)
    block, mine = Block(0, 1, 0, 0, 2), MicroBatches(1)
    source = train_source(rows, CUT, RowStream(mine, 2), 1, synthetic=True)
    try:
        with pytest.raises(
            DataError, match=r"x\.bin, sequence 1: token 999 lies outside the model's vocabulary of 999"
        ):
            list(source.batches(block))
    finally:
        source.close()


def test_tokens_that_are_cut_off_are_refused_before_any_is_read(tmp_path):
    write(tmp_path / "x", 500)
    bin_of(tmp_path / "x").write_bytes(bin_of(tmp_path / "x").read_bytes()[:-1])

    with pytest.raises(DataError, match=r"999 bytes where x\.idx says 1000: it is cut off"):
        open_blend([tmp_path / "x"], [1.0], SHAPE, 96, seed=3, shuffle_documents=True)


def test_made_up_rows_are_like_the_real_ones():
    for shape in (SHAPE, CUT):
        tokens = example(3, shape, seed=1)["tokens"]
        assert (tokens.shape, tokens.dtype) == ((3, 9), torch.int32)
        assert ((tokens[:, :8] >= 0) & (tokens[:, :8] < 1000)).all()
        assert (tokens[:, 8] >= 0).all() == shape.extra_token
