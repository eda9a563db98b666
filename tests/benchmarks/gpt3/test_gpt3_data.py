"""GPT-3's data: what the benchmark reads, from generated text to micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpt3 import prepare
from benchmarks.gpt3.data import ROWS
from benchmarks.gpt3.prepare import COMMANDS
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError
from common.language.pretraining import RowFacts
from tests.benchmarks.pretraining_checks import layout, prepared, rows

FACTS = RowFacts(vocabulary=400, row_length=32, eval_rows=10, eval_tokens=310, index_rows=640, consumed=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """300 rows to train on and 10 to evaluate."""
    return prepared(COMMANDS, tmp_path_factory.mktemp("gpt3"), 400)


def test_the_files_are_the_benchmarks():
    """Shards 768 to 1023 of C4 in two halves, and 24,567 documents of its validation set."""
    first, second, evaluation = prepare.CORPUS.parts

    assert (first.files[0], first.files[-1]) == ("c4-train.00768-of-01024.json.gz", "c4-train.00895-of-01024.json.gz")
    assert (second.files[0], second.files[-1]) == ("c4-train.00896-of-01024.json.gz", "c4-train.01023-of-01024.json.gz")
    assert len({*first.files, *second.files}) == 256
    assert evaluation.documents == 24_567
    assert prepare.CORPUS.vocabulary == 50_257
    assert set(prepare.CORPUS.published.with_md5) == {
        f"{part.name}.{end}" for part in prepare.CORPUS.parts for end in ("bin", "idx")
    }


def test_the_last_token_of_a_row_has_no_label(data):
    found = torch.cat(rows(ROWS.open_train(data, FACTS, layout(), 4)))

    assert (found.shape, found.dtype) == ((64, 33), torch.int32)
    assert ((found[:, :32] >= 0) & (found[:, :32] < 400)).all()
    assert (found[:, 32] == -1).all()


def shuffled_rows(path, rows, random):
    """The rows of one half, from the definition: documents in their order, epochs apart where the last is short."""
    tokens = np.fromfile(path, "<u2")
    epochs = -(-rows * 32 // len(tokens))
    count, before = epochs * len(tokens) // 32, (epochs - 1) * len(tokens) // 32
    apart = epochs > 1 and rows - before < int(0.8 * (len(tokens) // 32))
    parts = [np.arange(before), np.arange(before, count)] if apart else [np.arange(count)]
    order = [part.astype(np.uint32) for part in parts]
    for part in order:
        random.shuffle(part)
    stream = np.tile(tokens, epochs)
    return [stream[32 * row : 32 * row + 32].tolist() for row in np.concatenate(order)]


def test_training_takes_rows_of_both_halves_in_turn_and_shuffles_no_documents(data):
    halves = [
        shuffled_rows(data / f"{name}.bin", 322, np.random.RandomState(11)) for name in prepare.HALVES
    ]  # 640 / 2 * 1.005

    found = torch.cat(rows(ROWS.open_train(data, FACTS, layout(), 4)))[:, :32].tolist()
    assert found == [halves[position % 2][position // 2] for position in range(64)]


def test_rows_beyond_the_order_are_refused(data):
    with pytest.raises(DataError, match="wants row 643 of 640"):
        rows(ROWS.open_train(data, replace(FACTS, consumed=632), layout(), 4), Block(0, 1, 0, 0, 16))


def test_all_stages_of_a_replica_read_the_same_rows(data):
    stages = [Layout({"pp": 2, "tp": 2}, rank=rank, seed=11) for rank in range(4)]
    found = [torch.cat(rows(ROWS.open_train(data, FACTS, stage, 4))) for stage in stages]

    assert all(torch.equal(found[0], other) for other in found[1:])


def test_the_evaluation_is_all_rows_in_their_order_and_what_is_left(data):
    tokens = np.fromfile(data / f"{prepare.EVAL}.bin", "<u2").astype(np.int64).tolist()
    count = -(-len(tokens) // 32)
    left = len(tokens) - 32 * (count - 1)
    assert 1 < left < 32, "the synthetic data must have an incomplete row"
    facts = replace(FACTS, eval_rows=count, eval_tokens=31 * (count - 1) + left - 1)
    found = []
    for replica in range(3):
        source = ROWS.open_evaluation(data, facts, layout(3, replica), rows_per_batch=2)
        found += [row.tolist() for batch in source for row in batch.tensors["tokens"][batch.tensors["present"]]]
        source.close()

    cuts = [tokens[32 * row : 32 * row + 32] for row in range(count)]
    assert found == [cut + [-1] * (33 - len(cut)) for cut in cuts]


def test_an_evaluation_of_other_documents_is_refused(data):
    with pytest.raises(DataError, match="10 rows have 310 labels where 309 are evaluated"):
        ROWS.open_evaluation(data, replace(FACTS, eval_tokens=309), layout())
    with pytest.raises(DataError, match=r"rows of 32 where 10000 are evaluated"):
        ROWS.open_evaluation(data, replace(FACTS, eval_rows=10_000), layout())


def test_data_for_another_model_are_refused(data):
    with pytest.raises(DataError, match="has a vocabulary of 400 tokens, the model one of 512"):
        ROWS.open_train(data, replace(FACTS, vocabulary=512), layout(), 4)


def test_made_up_rows():
    made_up = ROWS.example(3, FACTS)["tokens"]
    assert made_up.shape == (3, 33)
    assert (made_up[:, -1] == -1).all()
