"""Rows of documents, against formulas that are written here from their definition, and cases worked by hand."""

import numpy as np
import pytest

from common.data.megatron import samples
from common.data.megatron.samples import asked_of_each, blended, build_samples, epochs_for
from common.errors import ConfigError, DataError


def walk(lengths, order, row_length, rows, extra):
    """The sample index, token by token of the concatenated stream."""
    starts, position, offset = [(0, 0)], 0, 0
    for _ in range(rows):
        needed = row_length + extra
        while needed:
            left = lengths[order[position]] - offset
            if left >= needed:
                offset += needed - extra
                needed = 0
            elif position == len(order) - 1:
                offset = lengths[order[position]] - extra
                needed = 0
            else:
                needed -= left
                position, offset = position + 1, 0
        starts.append((position, offset))
    return starts


def stream(index, lengths):
    """Every row as (document, token) pairs, in the order of the training."""
    return [
        [
            (piece.document, token)
            for piece in index.pieces(position, lengths)
            for token in range(piece.start, piece.stop)
        ]
        for position in range(len(index))
    ]


def test_worked_by_hand_with_an_extra_token():
    """The same documents: two rows, whose labels end with the first token of the next row."""
    lengths = np.array([3, 5, 4], np.int32)
    index = build_samples(lengths, 4, None, extra_token=True, seed=None)

    assert index.starts.tolist() == [[0, 0], [1, 1], [2, 0]]
    assert stream(index, lengths) == [
        [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)],
        [(1, 1), (1, 2), (1, 3), (1, 4), (2, 0)],
    ]


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("chunk", [3, 1 << 24])
def test_starts_are_those_of_a_walk_through_the_stream(monkeypatch, chunk, extra, keep_partial):
    """Short and long documents, some that end with a row, some without tokens, over several epochs and chunks."""
    monkeypatch.setattr(samples, "_CHUNK", chunk)
    random = np.random.default_rng(3)
    for case in range(60):
        lengths = random.choice([1, 2, 3, 4, 7, 8, 21, 40, 0], size=random.integers(1, 12)).astype(np.int32)
        lengths[0] = max(lengths[0], 3)
        row_length, epochs = int(random.integers(2, 9)), int(random.integers(1, 4))
        tokens = int(lengths.sum())
        rows = (epochs * tokens - extra) // row_length
        if rows < 1 or epochs_for(rows, tokens, row_length, extra) != epochs:
            continue
        index = build_samples(lengths, row_length, rows, extra_token=bool(extra), seed=None, keep_partial=keep_partial)
        order = list(range(len(lengths))) * epochs
        partial = keep_partial and (epochs * tokens - extra) % row_length > 0
        expected = walk(lengths.tolist(), order, row_length, rows + partial, extra)
        assert index.starts.tolist() == [list(entry) for entry in expected], (case, lengths, row_length)


@pytest.mark.parametrize("extra", [False, True])
def test_rows_in_their_order_are_the_stream_of_tokens(extra):
    lengths = np.array([5, 1, 9, 30, 2, 2, 16], np.int32)
    tokens = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    index = build_samples(lengths, 8, None, extra_token=extra, seed=None)

    assert len(index) == (65 - extra) // 8
    for number, row in enumerate(stream(index, lengths)):
        assert row == tokens[8 * number : 8 * number + 8 + extra]


@pytest.mark.parametrize(("rows", "epochs"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)], ids=lambda value: str(value))
def test_epochs_are_as_few_as_give_the_rows(rows, epochs):
    """65 tokens, rows of 8 and one token behind: 8 rows in one epoch, (130 - 1) / 8 = 16 in two."""
    assert epochs_for(rows, 65, 8, 1) == epochs


def test_numpys_generator_draws_the_rows():
    """One epoch, documents in their natural order: only the rows are shuffled."""
    lengths = np.full(30, 4, np.int32)
    index = build_samples(lengths, 8, None, extra_token=False, seed=1234)
    expected = np.arange(15, dtype=np.uint32)
    np.random.RandomState(1234).shuffle(expected)

    assert index.order.dtype == np.uint32
    assert index.order.tolist() == expected.tolist()
    assert index.documents.tolist() == list(range(30))


@pytest.mark.parametrize(("rows", "separate"), [(35, True), (36, False)])
def test_a_last_epoch_of_which_less_than_four_fifths_are_used_is_shuffled_by_itself(rows, separate):
    """Epochs of 80 tokens have 20 rows of 4; of the second one 15 or 16 rows are used, and 16 are four fifths."""
    lengths = np.full(8, 10, np.int32)
    index = build_samples(lengths, 4, rows, extra_token=False, seed=5, shuffle_documents=True)
    random = np.random.RandomState(5)
    if separate:
        documents = [np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32)]
        order = [np.arange(20, dtype=np.uint32), np.arange(20, 40, dtype=np.uint32)]
    else:
        documents = [np.array([*range(8), *range(8)], np.int32)]
        order = [np.arange(40, dtype=np.uint32)]
    for part in (*documents, *order):
        random.shuffle(part)

    assert index.documents.tolist() == np.concatenate(documents).tolist()
    assert index.order.tolist() == np.concatenate(order).tolist()


def test_the_rows_of_gpt3s_validation_set():
    """11,595,666 tokens of 24,567 documents are 5,662 rows, the last of 1,938 tokens."""
    lengths = np.full(24_567, 472, np.int32)
    lengths[0] += 11_595_666 - int(lengths.sum())
    index = build_samples(lengths, 2048, None, extra_token=False, seed=None, keep_partial=True)
    last = sum(piece.stop - piece.start for piece in index.pieces(5661, lengths))

    assert (len(index), last) == (5662, 1938)


def greedy(weights, rows):
    used, made = [0] * len(weights), []
    for row in range(rows):
        errors = [weight * max(row, 1) - count for weight, count in zip(weights, used, strict=True)]
        best = int(np.argmax(errors))
        made.append((best, used[best]))
        used[best] += 1
    return made


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.25, 0.25, 0.25), (0.7, 0.3), (0.125, 0.25, 0.625), (1.0,)])
def test_a_blend_takes_from_the_file_that_is_behind_most(weights):
    files, numbers = blended(weights, 300)

    assert list(zip(files.tolist(), numbers.tolist(), strict=True)) == greedy(weights, 300)
    assert (files.dtype, numbers.dtype) == (np.int16, np.int64)


def test_files_of_a_blend_provide_a_few_more_rows_than_their_share():
    assert asked_of_each((0.5, 0.5), 20_000_000) == [10_050_000, 10_050_000]
    assert asked_of_each((3.0, 1.0), 10) == [8, 3]


def test_impossible_requests():
    some = np.array([4, 4], np.int32)
    with pytest.raises(DataError, match="8 tokens make no row of 9"):
        build_samples(some, 9, None, extra_token=False, seed=None)
    with pytest.raises(DataError, match="8 tokens make no row of 8 and the one behind it"):
        build_samples(some, 8, None, extra_token=True, seed=None)
    with pytest.raises(DataError, match="no tokens"):
        build_samples(some * 0, 8, None, extra_token=True, seed=None)
    with pytest.raises(ConfigError, match="0 rows of 8 tokens"):
        build_samples(some, 8, 0, extra_token=True, seed=None)
    with pytest.raises(ConfigError, match="positive numbers"):
        blended((0.5, 0.0), 3)
