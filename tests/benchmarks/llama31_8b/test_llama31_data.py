"""Llama 3.1 8B's data: what the benchmark reads, from generated text to micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.llama31_8b import prepare
from benchmarks.llama31_8b.data import ROWS
from benchmarks.llama31_8b.prepare import COMMANDS
from common.data.batches import Block
from common.errors import DataError
from common.language.pretraining import RowFacts
from tests.benchmarks.pretraining_checks import layout, prepared, rows

FACTS = RowFacts(vocabulary=300, row_length=32, eval_rows=10, index_rows=640)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """300 rows to train on and 10 to evaluate."""
    return prepared(COMMANDS, tmp_path_factory.mktemp("llama31"), 300)


def test_the_files_are_the_benchmarks():
    """Shards 768 to 895 of C4, and 91,205 documents of its validation set, whose index has the published size."""
    train, evaluation = prepare.CORPUS.parts

    assert (train.files[0], train.files[-1]) == ("c4-train.00768-of-01024.json.gz", "c4-train.00895-of-01024.json.gz")
    assert len(set(train.files)) == 128
    assert evaluation.documents == 91_205
    assert prepare.CORPUS.published.files[f"{prepare.EVAL}.idx"].bytes == 42 + 20 * 91_205
    assert prepare.CORPUS.published.files[f"{prepare.TRAIN}.idx"].bytes == 42 + 20 * 45_608_611
    assert prepare.CORPUS.published.files[f"{prepare.TRAIN}.bin"].bytes % 4 == 0


def test_every_token_of_a_row_has_a_label(data):
    facts = FACTS
    found = torch.cat(rows(ROWS.open_train(data, facts, layout(), 4)))

    assert (found.shape, found.dtype) == ((64, 33), torch.int32)
    assert ((found >= 0) & (found < 300)).all()


def test_training_is_a_shuffle_of_documents_and_rows(data):
    """Row by row from the definition: documents of three epochs shuffled, cut, and the rows shuffled."""
    facts = replace(FACTS, index_rows=700)
    lengths = np.fromfile(data / f"{prepare.TRAIN}.idx", "<i4", offset=34)
    documents = int(np.fromfile(data / f"{prepare.TRAIN}.idx", "<u8", count=1, offset=18)[0])
    lengths = lengths[:documents]
    tokens = np.fromfile(data / f"{prepare.TRAIN}.bin", "<u2")
    epochs = -(-(700 * 32 + 1) // int(lengths.sum()))
    per_epoch, before = (len(tokens) - 1) // 32, ((epochs - 1) * len(tokens) - 1) // 32
    assert (epochs, 700 - before < int(0.8 * per_epoch)) == (3, True)  # the last epoch is by itself
    random = np.random.RandomState(11)
    first, last = np.tile(np.arange(documents, dtype=np.int32), 2), np.arange(documents, dtype=np.int32)
    random.shuffle(first)
    random.shuffle(last)
    texts = np.split(tokens, np.cumsum(lengths)[:-1])
    stream = np.concatenate([texts[document] for document in np.concatenate([first, last])])
    count = (len(stream) - 1) // 32
    order = [np.arange(before, dtype=np.uint32), np.arange(before, count, dtype=np.uint32)]
    for part in order:
        random.shuffle(part)
    expected = [stream[32 * row : 32 * row + 33].tolist() for row in np.concatenate(order)[:700]]

    found = torch.cat(rows(ROWS.open_train(data, facts, layout(), 4), Block(0, 1, 0, 0, 700)))
    assert found.tolist() == expected


def test_a_seed_of_its_own_is_another_order(data):
    facts = FACTS
    mine, other = (torch.cat(rows(ROWS.open_train(data, facts, layout(), 4, seed=seed))) for seed in (None, 12))

    assert not torch.equal(mine, other)


def test_the_evaluation_is_the_first_rows_not_shuffled(data):
    tokens = np.fromfile(data / f"{prepare.EVAL}.bin", "<u2")
    found = []
    for replica in range(3):
        source = ROWS.open_evaluation(data, FACTS, layout(3, replica), rows_per_batch=2)
        found += [row.tolist() for batch in source for row in batch.tensors["tokens"][batch.tensors["present"]]]
        source.close()

    assert found == [tokens[32 * row : 32 * row + 33].tolist() for row in range(10)]


def test_data_for_another_model_are_refused(data):
    with pytest.raises(DataError, match="has a vocabulary of 300 tokens, the model one of 512"):
        ROWS.open_train(data, replace(FACTS, vocabulary=512), layout(), 4)
    with pytest.raises(DataError, match=r"rows of 32 where 10000 are evaluated"):
        ROWS.open_evaluation(data, replace(FACTS, eval_rows=10_000), layout())


def test_made_up_rows(data):
    assert ROWS.example(3, FACTS)["tokens"].shape == (3, 33)
