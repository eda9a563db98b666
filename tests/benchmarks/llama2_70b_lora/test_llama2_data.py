"""Prepared rows to batches: shift, order, resuming, shares of the evaluation, columns of a rank."""

import json

import numpy as np
import pytest
import torch
from small_rows import LENGTH, Facts, write_prepared

from benchmarks.llama2_70b_lora.data import example, open_evaluation, open_train, shifted
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError

TRAIN, EVAL = 23, 173


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("rows") / "data", TRAIN, EVAL)


def block(samples, start=0):
    return Block(0, 1, 0, start, samples)


def rows_of(batches):
    return [int(row[0]) for batch in batches for row in batch.tensors["tokens"]]


def test_labels_are_the_next_tokens_that_are_scored_by_hand():
    tokens = np.array([[1, 10, 11, 12, 2]], np.int32)

    everything = shifted(tokens, None)
    answers = shifted(tokens, np.array([[0, 0, 1, 1, 0]], np.uint8))

    assert everything["labels"].tolist() == [[10, 11, 12, 2, -1]]
    assert answers["labels"].tolist() == [[-1, 11, 12, -1, -1]]
    assert {tensor.dtype for tensor in everything.values()} == {torch.int32}


def test_the_first_token_of_a_row_is_nobody_s_label():
    assert shifted(np.array([[1, 2]], np.int32), np.array([[1, 0]], np.uint8))["labels"].tolist() == [[-1, -1]]


def test_columns_are_taken_after_the_shift():
    """Rank 1 of context parallelism over two ranks has the inner chunks; its last label is another rank's token."""
    tokens = np.arange(10, 18, dtype=np.int32)[None]

    made = shifted(tokens, None, np.array([2, 3, 4, 5]))

    assert made["tokens"].tolist() == [[12, 13, 14, 15]]
    assert made["labels"].tolist() == [[13, 14, 15, 16]]


def test_an_epoch_has_every_row_once_and_the_next_another_order(root):
    source = open_train(root, Facts(), Layout(seed=3), 1)

    rows = rows_of(source.batches(block(2 * TRAIN)))

    assert (source.train_samples, source.eval_samples, source.synthetic) == (TRAIN, EVAL, True)
    assert sorted(rows[:TRAIN]) == sorted(rows[TRAIN:]) == list(range(TRAIN))
    assert rows[:TRAIN] != rows[TRAIN:]
    assert rows != rows_of(open_train(root, Facts(), Layout(seed=4), 1).batches(block(2 * TRAIN)))


def test_training_batches_hold_whole_rows_and_score_every_token(root):
    written = np.load(root / "train_tokens.npy")

    batch = next(open_train(root, Facts(), Layout(), 3).batches(block(3)))

    rows = written[[int(row[0]) for row in batch.tensors["tokens"]]]
    assert batch.tensors["tokens"].numpy().tolist() == rows.tolist()
    assert batch.tensors["labels"][:, :-1].numpy().tolist() == rows[:, 1:].tolist()
    assert (batch.tensors["labels"][:, -1] == -1).all()
    assert batch.tensors["dropout_seed"].shape == ()
    assert batch.tensors["dropout_seed"].dtype == torch.int64
    assert batch.samples == 3


@pytest.mark.parametrize("start", [1, 4, 7])
def test_batches_from_a_position_are_the_tail(root, start):
    layout = Layout({"dp": 2}, 1, seed=5)
    whole = list(open_train(root, Facts(), layout, 2, 2).batches(block(32, 16)))

    tail = list(open_train(root, Facts(), layout, 2, 2).batches(block(32, 16), start))

    assert len(whole) == 8
    assert [batch.position for batch in tail] == list(range(start, 8))
    for one, other in zip(whole[start:], tail, strict=True):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_replicas_see_what_one_sees_that_accumulates_with_the_same_dropout(root):
    one = list(open_train(root, Facts(), Layout(seed=5), 1, 4).batches(block(16)))
    two = [list(open_train(root, Facts(), Layout({"dp": 2}, rank, seed=5), 1, 2).batches(block(16))) for rank in (0, 1)]

    both = [batch for pair in zip(*two, strict=True) for batch in pair]
    assert rows_of(one) == rows_of(both)
    seeds = [int(batch.tensors["dropout_seed"]) for batch in one]
    assert seeds == [int(batch.tensors["dropout_seed"]) for batch in both]
    assert len(set(seeds)) == 16


def test_ranks_that_share_a_row_see_the_same_rows_and_their_own_columns(root):
    columns = [torch.tensor([*range(16), *range(48, 64)]), torch.arange(16, 48)]
    ranks = [
        next(
            open_train(root, Facts(), Layout({"cp": 2}, rank, seed=5), 2, positions=columns[rank]).batches(block(2))
        ).tensors
        for rank in (0, 1)
    ]
    whole = next(open_train(root, Facts(), Layout(seed=5), 2).batches(block(2))).tensors

    for name in ("tokens", "labels"):
        joined = torch.empty_like(whole[name])
        for rank, part in enumerate(ranks):
            joined[:, columns[rank]] = part[name]
        assert torch.equal(joined, whole[name])
    assert ranks[0]["dropout_seed"] == ranks[1]["dropout_seed"] == whole["dropout_seed"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 4, 200])
def test_replicas_together_evaluate_every_row_once(root, replicas, rows):
    tokens, scored = np.load(root / "eval_tokens.npy"), np.load(root / "eval_scored.npy")
    seen, lengths = [], set()
    for rank in range(replicas):
        source = open_evaluation(root, Facts(), Layout({"dp": replicas}, rank), rows)
        lengths.add(len(list(source)))
        assert len(source) == len(list(source))
        for batch in source:
            assert batch.tensors["tokens"].shape == batch.tensors["labels"].shape == (rows, LENGTH)
            for ids, labels, present in zip(*(batch.tensors[n] for n in ("tokens", "labels", "present")), strict=True):
                if present:
                    number = int(ids[0])
                    seen.append(number)
                    assert ids.tolist() == tokens[number].tolist()
                    following = np.append(tokens[number, 1:], 0)
                    asked = np.append(scored[number, 1:], 0)
                    assert labels.tolist() == np.where(asked, following, -1).tolist()
                else:
                    assert not ids.any()
                    assert (labels == -1).all()
    assert sorted(seen) == list(range(EVAL))
    assert len(lengths) == 1


def test_evaluation_columns_are_a_rank_s(root):
    columns = torch.tensor([0, 1, 62, 63])
    whole = list(open_evaluation(root, Facts(), Layout(), 5))

    own = list(open_evaluation(root, Facts(), Layout({"cp": 2}, 1), 5, columns))

    for one, other in zip(whole, own, strict=True):
        for name in ("tokens", "labels"):
            assert torch.equal(one.tensors[name][:, columns], other.tensors[name])
        assert torch.equal(one.tensors["present"], other.tensors["present"])


def test_an_example_is_like_a_batch(root):
    real = next(open_train(root, Facts(), Layout(), 2).batches(block(2))).tensors
    made = example(2, Facts())

    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {n: (t.shape, t.dtype) for n, t in real.items()}
    assert example(2, Facts(), columns=16)["labels"].shape == (2, 16)
    assert int(made["tokens"].max()) < Facts().vocabulary


@pytest.mark.parametrize(("name", "facts"), [("row_length", Facts(row_length=32)), ("vocabulary", Facts(vocabulary=9))])
def test_rows_for_another_model_are_refused(root, name, facts):
    for opened in (lambda: open_train(root, facts, Layout(), 1), lambda: open_evaluation(root, facts, Layout())):
        with pytest.raises(DataError, match=f"has {name} .* where the model has"):
            opened()


def test_a_file_that_differs_from_the_manifest_is_named(tmp_path):
    root = write_prepared(tmp_path / "data", 4, 4)
    path = root / "eval_tokens.npy"
    path.write_bytes(np.load(path).astype(np.int32).T.tobytes().ljust(path.stat().st_size, b"\0"))
    with pytest.raises(DataError, match=r"eval_tokens\.npy cannot be read"):
        open_evaluation(root, Facts(), Layout())
    np.save(path, np.zeros((LENGTH, 4), np.int32))
    with pytest.raises(DataError, match=r"eval_tokens\.npy holds int32 of shape \(64, 4\)"):
        open_train(root, Facts(), Layout(), 1)
    path.unlink()
    with pytest.raises(DataError, match=r"eval_tokens\.npy is missing"):
        open_train(root, Facts(), Layout(), 1)


def test_a_manifest_without_a_file_is_refused(tmp_path):
    root = write_prepared(tmp_path / "data", 4, 4)
    content = json.loads((root / "manifest.json").read_text())
    del content["files"]["eval_scored.npy"]
    (root / "manifest.json").write_text(json.dumps(content))

    with pytest.raises(DataError, match=r"names no eval_scored\.npy"):
        open_train(root, Facts(), Layout(), 1)
