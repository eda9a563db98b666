"""The whole preparation: three raw formats to the same rows, assets, and every kind of bad input."""

import json
import shutil

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from small_rows import LENGTH, VOCABULARY, mark, texts, write_object_array, write_parquet, write_texts, write_tokenizer

from benchmarks.llama2_70b_lora.prepare import prepare, verify
from common.errors import DataError

SIZES = {"train": 120, "validation": 40}


def by_hand(pairs, tokenizer, processes, answers_only):
    """Ids and labels of rows, as the reference makes them of Python's lists."""
    examples = []
    for report, summary in pairs:
        asked = f"### Summarize the following text:\n {report}\n ### Summary:\n"
        ids = [1, *tokenizer.encode(f"{asked} {summary}"), 2]
        labels = list(ids)
        if answers_only:
            labels[: 1 + len(tokenizer.encode(asked))] = [-100] * (1 + len(tokenizer.encode(asked)))
            labels[-1] = -100
        if len(ids) <= LENGTH:
            examples.append((ids, labels))
    assert len(examples) < len(pairs), "no example is too long for a row"
    rows = []
    for share in np.array_split(np.arange(len(examples)), processes):  # longer shares first, all below 1000
        every = [list(pair) for n in share for pair in zip(*examples[n], strict=True)]
        rows += [every[first : first + LENGTH] for first in range(0, len(every) - LENGTH + 1, LENGTH)]
    return [[pair[0] for pair in row] for row in rows], [[pair[1] for pair in row] for row in rows]


@pytest.fixture(scope="module")
def raws(tmp_path_factory):
    """A raw folder of each kind, and the rows that they stand for."""
    root = tmp_path_factory.mktemp("raws")
    folders = {kind: root / kind for kind in ("text", "parquet", "npy")}
    for folder in folders.values():
        folder.mkdir()
        mark(folder)
    tokenizer = write_tokenizer(folders["text"] / "tokenizer.model")
    expected = {}
    for seed, (name, count) in enumerate(SIZES.items()):
        pairs = texts(count, seed)
        write_texts(folders["text"] / f"{name}.jsonl", pairs)
        train = name == "train"
        tokens, labels = expected[name] = by_hand(pairs, tokenizer, 8 if train else 2, not train)
        half = len(tokens) // 2
        for part, rows in enumerate((slice(0, half), slice(half, None))):
            path = folders["parquet"] / f"{name}-{part:05d}-of-00002.parquet"
            write_parquet(path, tokens[rows], labels[rows])
        write_object_array(folders["npy"] / f"{name}.npy", tokens, labels)
    return folders, expected


@pytest.fixture
def copy(raws, tmp_path):
    """Makes a copy of the raw folder of a kind, to be damaged."""

    def make(kind):
        return shutil.copytree(raws[0][kind], tmp_path / "raw")

    return make


def prepared_arrays(data):
    return [np.load(data / f"{name}.npy") for name in ("train_tokens", "eval_tokens", "eval_scored")]


@pytest.mark.parametrize("kind", ["text", "parquet", "npy"])
def test_every_raw_format_gives_the_rows_worked_out_by_hand(raws, tmp_path, kind):
    folders, expected = raws
    assert min(len(rows[0]) for rows in expected.values()) > 4

    made = prepare(folders[kind], tmp_path / "data", workers=2)

    train, evaluation, scored = prepared_arrays(tmp_path / "data")
    assert (train.dtype, evaluation.dtype, scored.dtype) == (np.int32, np.int32, np.uint8)
    assert train.tolist() == expected["train"][0]
    assert evaluation.tolist() == expected["validation"][0]
    assert scored.tolist() == [[int(label != -100) for label in row] for row in expected["validation"][1]]
    assert made.synthetic
    assert made.counts["train_samples"] == len(expected["train"][0])
    assert made.counts["eval_scored_tokens"] == scored[:, 1:].sum()
    assert verify(tmp_path / "data") == made


def test_the_row_length_may_be_chosen_for_texts(raws, tmp_path):
    prepare(raws[0]["text"], tmp_path / "data", row_length=100)

    assert np.load(tmp_path / "data" / "train_tokens.npy").shape[1] == 100


def test_a_synthetic_data_set_keeps_its_first_rows(copy, tmp_path):
    raw = copy("npy")
    mark(raw, train_rows=5, eval_rows=3)

    prepare(raw, tmp_path / "data")

    train, evaluation, scored = prepared_arrays(tmp_path / "data")
    assert (len(train), len(evaluation), len(scored)) == (5, 3, 3)


def test_too_few_rows_are_an_error(copy, tmp_path):
    raw = copy("npy")
    mark(raw, train_rows=5000)

    with pytest.raises(DataError, match=r"train\.npy gives \d+ rows of 64 tokens, expected 5000"):
        prepare(raw, tmp_path / "data")


def test_rows_without_a_mark_are_the_benchmark_s_and_have_8192_tokens(copy, tmp_path):
    raw = copy("npy")
    (raw / "SYNTHETIC").unlink()

    with pytest.raises(DataError, match=r"train\.npy, row 0 has 64 input_ids instead of 8192"):
        prepare(raw, tmp_path / "data")


def test_real_rows_cannot_be_cut_short_without_being_called_custom(copy, tmp_path):
    raw = copy("npy")
    (raw / "SYNTHETIC").unlink()

    made = prepare(raw, tmp_path / "data", row_length=LENGTH)
    assert (made.synthetic, made.custom) == (False, "train_samples is 69, published is 3901")


def test_texts_without_a_mark_need_llama_s_tokenizer(copy, tmp_path):
    raw = copy("text")
    (raw / "SYNTHETIC").unlink()

    with pytest.raises(DataError, match=r"tokenizer\.model: SHA-256 .* where Llama 2's has 9e556afd"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize(
    ("kind", "remove", "message"),
    [
        ("text", "tokenizer.model", "texts need Llama 2's tokenizer"),
        ("text", "validation.jsonl", r"validation\.jsonl is missing"),
        ("npy", "train.npy", r"train\.npy is missing"),
    ],
)
def test_a_missing_file_is_named(copy, tmp_path, kind, remove, message):
    raw = copy(kind)
    (raw / remove).unlink()

    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "data")


def test_an_empty_folder_and_two_kinds_at_once_are_errors(copy, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no train\.jsonl"):
        prepare(tmp_path / "empty", tmp_path / "data")
    with pytest.raises(DataError, match="does not exist"):
        prepare(tmp_path / "nothing", tmp_path / "data")
    raw = copy("npy")
    write_texts(raw / "train.jsonl", [("a", "b")])
    with pytest.raises(DataError, match="leave one of them there"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize("line", ['{"input": "a"}', '{"input": "a", "output": null}', "[1]", "not json", "\xff"])
def test_a_damaged_line_is_named(copy, tmp_path, line):
    raw = copy("text")
    with open(raw / "train.jsonl", "ab") as file:
        file.write(line.encode("latin-1") + b"\n")

    with pytest.raises(DataError, match=r"train\.jsonl, line 121 "):
        prepare(raw, tmp_path / "data")


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(copy, tmp_path):
    raw = copy("text")
    mark(raw, vocabulary=270)

    with pytest.raises(DataError, match="exceeds a vocabulary of 270"):
        prepare(raw, tmp_path / "data")


def test_a_file_that_is_no_tokenizer_is_named(copy, tmp_path):
    raw = copy("text")
    (raw / "tokenizer.model").write_bytes(b"nothing")

    with pytest.raises(DataError, match=r"tokenizer\.model is no SentencePiece model"):
        prepare(raw, tmp_path / "data")


GOOD = [[5] * LENGTH, [6] * LENGTH, [7] * LENGTH]


@pytest.mark.parametrize("kind", ["parquet", "npy"])
@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        ([*GOOD, [5] * (LENGTH - 1)], [*GOOD, [5] * (LENGTH - 1)], "row 3 has 63 .* instead of 64"),
        ([*GOOD[:2], [VOCABULARY] * LENGTH], [*GOOD[:2], [VOCABULARY] * LENGTH], "row 2: token 300 lies outside"),
        ([*GOOD[:2], [-1] * LENGTH], [*GOOD[:2], [-1] * LENGTH], "row 2: token -1 is of no vocabulary"),
        (GOOD, [*GOOD[:2], [-100] * 7 + [7] * (LENGTH - 7)], "row 2: the loss leaves 7 tokens out"),
    ],
)
def test_a_bad_row_is_named(copy, tmp_path, kind, tokens, labels, message):
    raw = copy(kind)
    if kind == "parquet":
        path = raw / "train-00000-of-00002.parquet"
        write_parquet(path, tokens, labels)
    else:
        path = raw / "train.npy"
        write_object_array(path, tokens, labels)

    with pytest.raises(DataError, match=f"{path.name}, {message}"):
        prepare(raw, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_label_that_is_another_token_is_an_error(copy, tmp_path):
    raw = copy("parquet")
    path = raw / "train-00000-of-00002.parquet"
    write_parquet(path, GOOD, [*GOOD[:2], [7] * 9 + [8] * (LENGTH - 9)])

    with pytest.raises(DataError, match="row 2: token 9 is 7 and its label 8"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1]]}, "has no column labels"),
        ({"input_ids": ["text"], "labels": ["text"]}, "not lists of integers"),
        ({"input_ids": [[0.5] * LENGTH], "labels": [[0.5] * LENGTH]}, "lists are of double"),
        ({"input_ids": [[None] * LENGTH], "labels": [[1] * LENGTH]}, "of null, not of integers"),
        ({"input_ids": [[1] * (LENGTH - 1) + [None]], "labels": [[1] * LENGTH]}, "1 tokens are null"),
        ({"input_ids": [None], "labels": [[1] * LENGTH]}, "not lists|has 0 tokens"),
    ],
)
def test_parquet_of_other_things_is_an_error(copy, tmp_path, columns, message):
    raw = copy("parquet")
    parquet.write_table(pyarrow.table(columns), raw / "train-00000-of-00002.parquet")

    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize("name", ["train-00000-of-00002.parquet", "validation-00001-of-00002.parquet"])
def test_a_cut_off_parquet_file_is_named(copy, tmp_path, name):
    raw = copy("parquet")
    (raw / name).write_bytes((raw / name).read_bytes()[:-9])

    with pytest.raises(DataError, match=f"{name} cannot be read as parquet"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2], "row 0 is no dict with input_ids and loss_mask"),
        ({"input_ids": np.zeros(LENGTH, np.int32)}, "row 0 is no dict"),
        ({"input_ids": "text", "loss_mask": [1] * LENGTH}, "no list of integers|no integers"),
        ({"input_ids": [0.5] * LENGTH, "loss_mask": [1] * LENGTH}, "holds more than integers"),
        ({"input_ids": [1] * LENGTH, "loss_mask": [2] * LENGTH}, "values beside 0 and 1"),
        ({"input_ids": [2**40] * LENGTH, "loss_mask": [1] * LENGTH}, "is of no vocabulary"),
        ({"input_ids": [2**80] * LENGTH, "loss_mask": [1] * LENGTH}, "no integers"),
    ],
)
def test_an_object_array_of_other_things_is_an_error(copy, tmp_path, row, message):
    raw = copy("npy")
    array = np.empty(1, object)
    array[0] = row
    np.save(raw / "train.npy", array, allow_pickle=True)

    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "data")


def test_the_tokenizer_and_the_base_are_linked_beside_the_data(copy, tmp_path):
    raw = copy("text")
    (raw / "base").mkdir()
    for name in ("config.json", "model.safetensors"):
        (raw / "base" / name).write_text(name)

    prepare(raw, tmp_path / "data")
    prepare(raw, tmp_path / "data")  # nothing to do

    assets = tmp_path / "data-assets"
    for name in ("tokenizer.model", "base/config.json", "base/model.safetensors"):
        assert (assets / name).samefile(raw / name)
    assert not list((tmp_path / "data").glob("*.safetensors"))


def test_assets_may_lie_elsewhere(copy, tmp_path):
    prepare(copy("text"), tmp_path / "data", assets_dir=tmp_path / "there")

    assert (tmp_path / "there" / "tokenizer.model").is_file()
    assert not (tmp_path / "data-assets").exists()


def test_another_base_is_not_written_over(copy, tmp_path):
    raw = copy("text")
    (raw / "base").mkdir()
    for name in ("config.json", "model.safetensors"):
        (raw / "base" / name).write_text(name)
    (tmp_path / "data-assets" / "base").mkdir(parents=True)
    (tmp_path / "data-assets" / "base" / "config.json").write_text("another model")

    with pytest.raises(DataError, match=r"config\.json is another file than"):
        prepare(raw, tmp_path / "data")
    assert (tmp_path / "data-assets" / "base" / "config.json").read_text() == "another model"


def test_shards_of_another_base_are_not_left_beside_this_one(copy, tmp_path):
    raw = copy("text")
    (raw / "base").mkdir()
    for name in ("config.json", "model.safetensors"):
        (raw / "base" / name).write_text(name)
    (tmp_path / "data-assets" / "base").mkdir(parents=True)
    (tmp_path / "data-assets" / "base" / "model-00001-of-00002.safetensors").write_text("another model")

    with pytest.raises(DataError, match="of another base"):
        prepare(raw, tmp_path / "data")


def test_an_incomplete_base_is_an_error(copy, tmp_path):
    raw = copy("text")
    (raw / "base").mkdir()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (raw / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    (raw / "base" / "config.json").write_text("{}")

    with pytest.raises(DataError, match=r"model-00001-of-00002\.safetensors is missing"):
        prepare(raw, tmp_path / "data")
