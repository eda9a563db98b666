"""C4's text to Megatron's files: order, tokenizers, interruption, pairs that others made, and bad input."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from common.data import synthetic
from common.data.megatron import preparation
from common.data.megatron.corpus import Corpus, CorpusPart, open_raw, open_tokenizer
from common.data.megatron.indexed import bin_of, idx_of, indexed_writer, open_indexed
from common.data.megatron.preparation import commands_for, prepare, read_documents, read_manifest
from common.data.megatron.synthetic import SyntheticText, generate, train_tokenizer
from common.data.published import Published, PublishedFile
from common.errors import ConfigError, DataError

WORDS = ("sum", "ärger", "list", "parameter", "iterator", "keyword", "function", "exception", "returns", "mapping")
TEXTS = [
    f"The {WORDS[n % 10]} of {n} {WORDS[n // 3 % 10]}s\nis not {WORDS[n * 7 % 9]}, {WORDS[n // 9]}." for n in range(36)
]


def corpus(tokenizer: str = "tokenizer.json", vocabulary: int = 300, **published) -> Corpus:
    """Two halves of two files each, and an evaluation of the first ten documents of two files."""
    return Corpus(
        "language",
        tokenizer,
        vocabulary,
        (
            CorpusPart("c4.en_6_text", "train", ("train.0.json.gz", "train.1.json.gz")),
            CorpusPart("c4.en_7_text", "train", ("train.2.json.gz", "train.3.json")),
            CorpusPart("c4-first.en_text", "eval", ("val.0.json.gz", "val.1.json.gz"), documents=10),
        ),
        Published(files={name: PublishedFile(size) for name, size in published.get("sizes", {}).items()}),
    )


def write(path: Path, texts: list[str]) -> None:
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    (folder / "en").mkdir(parents=True)
    train_tokenizer(folder / "tokenizer.json", TEXTS, 300)
    for number, name in enumerate(("train.0.json.gz", "train.1.json.gz", "train.2.json.gz", "train.3.json")):
        write(folder / "en" / name, TEXTS[5 * number : 5 * number + 5])
    write(folder / "en" / "val.0.json.gz", TEXTS[20:26])
    write(folder / "en" / "val.1.json.gz", TEXTS[26:36])
    return folder


def documents(prefix: Path) -> list[list[int]]:
    opened = open_indexed(prefix)
    return [opened.sequence(number).tolist() for number in range(len(opened))]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")}


def test_documents_come_in_the_order_of_files_and_lines(raw, tmp_path):
    made = prepare(raw, tmp_path / "data", corpus())
    tokenizer = Tokenizer.from_file(str(raw / "tokenizer.json"))
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]

    assert documents(tmp_path / "data" / "c4.en_6_text") == expected[:10]
    assert documents(tmp_path / "data" / "c4.en_7_text") == expected[10:20]
    assert documents(tmp_path / "data" / "c4-first.en_text") == expected[20:30]
    assert made.counts == {
        "vocabulary": 300,
        "train_documents": 20,
        "train_tokens": sum(map(len, expected[:20])),
        "eval_documents": 10,
        "eval_tokens": sum(map(len, expected[20:30])),
    }
    assert not made.synthetic
    assert sorted(made.files) == sorted(contents(tmp_path / "data"))
    assert not (tmp_path / "data" / "intermediate").exists()


def test_bytes_are_those_of_one_writer(raw, tmp_path):
    """Put together of pieces, a half is what one process writes from all its files."""
    prepare(raw, tmp_path / "data", corpus())
    tokenizer = Tokenizer.from_file(str(raw / "tokenizer.json"))
    with indexed_writer(tmp_path / "whole", 300) as writer:
        for text in TEXTS[:10]:
            writer.add(tokenizer.encode(text, add_special_tokens=False).ids)

    for ends in (bin_of, idx_of):
        assert ends(tmp_path / "data" / "c4.en_6_text").read_bytes() == ends(tmp_path / "whole").read_bytes()


def test_unpacked_text_will_do(raw, tmp_path):
    prepare(raw, tmp_path / "packed", corpus())
    for name in ("train.1.json.gz", "val.0.json.gz"):
        path = raw / "en" / name
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    prepare(raw, tmp_path / "data", corpus())

    assert contents(tmp_path / "data") == contents(tmp_path / "packed")


def test_workers_make_the_same(raw, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "TEXT_PER_WORKER", 1)
    prepare(raw, tmp_path / "one", corpus())
    prepare(raw, tmp_path / "two", corpus(), workers=2)

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_tokens_are_those_of_transformers_tokenizer(raw):
    """The reference tokenizes and looks the tokens up; a text may name a special token."""
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.from_file(str(raw / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end_of_text|>"])
    tokenizer.save(str(raw / "special.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(raw / "special.json"))
    texts = ["  two  blanks\n\n", "naïve ☃ <|end_of_text|> more", *TEXTS[:3], ""]
    found = open_tokenizer(raw / "special.json").encode(texts)

    assert found == [theirs.convert_tokens_to_ids(theirs.tokenize(text)) for text in texts]
    assert 300 in found[1]


def test_sentencepiece_without_anything_between_documents(raw, tmp_path):
    train_tokenizer(raw / "spm.model", TEXTS, 340)
    prepare(raw, tmp_path / "data", corpus("spm.model", 340))
    model = SentencePieceProcessor(model_file=str(raw / "spm.model"))

    assert (model.pad_id(), model.eos_id(), model.unk_id(), model.bos_id()) == (0, 1, 2, -1)
    assert model.encode("12", out_type=str)[-2:] == ["1", "2"]  # digits are split
    stream = np.fromfile(tmp_path / "data" / "c4.en_6_text.bin", "<u2").tolist()
    assert stream == [token for text in TEXTS[:10] for token in model.encode(text)]


def test_a_document_without_text_makes_no_sequence(raw, tmp_path):
    write(raw / "en" / "train.0.json.gz", ["", TEXTS[0], ""])
    prepare(raw, tmp_path / "data", corpus())
    index = open_indexed(tmp_path / "data" / "c4.en_6_text").index

    assert len(index) == 6
    assert index.documents.tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6]


def test_a_piece_that_was_placed_and_not_noted_is_not_missed(raw, tmp_path, monkeypatch):
    """Killed between a piece's end and its record: the piece is gone, and its tokens are where they belong."""
    prepare(raw, tmp_path / "whole", corpus())
    real, done = preparation.copy_piece, []

    def killed(*arguments):
        done.append(real(*arguments))
        raise OSError("killed")

    monkeypatch.setattr(preparation, "copy_piece", killed)
    with pytest.raises(DataError, match="killed"):
        prepare(raw, tmp_path / "data", corpus())
    monkeypatch.setattr(preparation, "copy_piece", real)
    prepare(raw, tmp_path / "data", corpus())

    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_pairs_that_others_made_are_linked_and_checked(raw, tmp_path):
    prepare(raw, tmp_path / "made", corpus())
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for path in (tmp_path / "made").glob("c4*"):
        os.link(path, pairs / path.name)
    made = prepare(pairs, tmp_path / "data", corpus())

    assert contents(tmp_path / "data") == contents(tmp_path / "made")
    assert (tmp_path / "data" / "c4.en_6_text.bin").samefile(pairs / "c4.en_6_text.bin")
    assert made.source["description"] == "C4 en 3.0.1, tokenized by others"
    (pairs / "c4.en_7_text.idx").unlink()
    with pytest.raises(DataError, match=r"c4\.en_7_text\.idx is missing, though others"):
        prepare(pairs, tmp_path / "other", corpus())


def test_pairs_of_another_tokenizer_are_refused(tmp_path):
    for part in corpus().parts:
        (tmp_path / "pairs").mkdir(exist_ok=True)
        with indexed_writer(tmp_path / "pairs" / part.name, 302) as writer:
            writer.add([1, 2, 301 if part.split == "eval" else 3])

    with pytest.raises(
        DataError, match=r"c4-first\.en_text\.bin: sequence 0 has token 301, outside a vocabulary of 300"
    ):
        prepare(tmp_path / "pairs", tmp_path / "data", corpus())


def test_a_model_of_another_vocabulary_is_refused(raw, tmp_path):
    prepare(raw, tmp_path / "data", corpus())

    assert read_manifest(tmp_path / "data", corpus(), 300).counts["vocabulary"] == 300
    with pytest.raises(DataError, match="has a vocabulary of 300 tokens, the model one of 128256"):
        read_manifest(tmp_path / "data", corpus(), 128_256)


def test_another_tokenizer_is_refused_before_any_work(raw, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json has 300 tokens where the model has 400"):
        prepare(raw, tmp_path / "data", corpus(vocabulary=400))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"text": "a"}\n' * 50)[:-12], r"cannot be read behind line \d+: .*fetch the file again"),
        (b"no gzip", "cannot be read behind line 0"),
        (gzip.compress(b'{"text": "a"}\n{"text": \n'), r"line 2 is damaged"),
        (gzip.compress(b'{"text": "a"}\n{"txt": "b"}\n'), r"line 2 lacks 'text'"),
        (gzip.compress(b'{"text": 7}\n'), r"line 1 is damaged \(its text is none\)"),
        (gzip.compress(b'{"text": "\xff"}\n'), r"line 1 is damaged"),
    ],
    ids=["cut off", "not compressed", "no JSON", "no text", "number", "no UTF-8"],
)
def test_damaged_text(tmp_path, content, message):
    (tmp_path / "x.json.gz").write_bytes(content)

    with pytest.raises(DataError, match=rf"x\.json\.gz.*{message}"):
        list(read_documents(tmp_path / "x.json.gz"))


def test_a_disk_that_is_too_small_is_found_before_any_work(raw, tmp_path, monkeypatch):
    """At most 0.6 tokens for each byte of a packed file and 0.25 of a plain one, of two bytes each."""
    usage = SimpleNamespace(free=500)
    monkeypatch.setattr("common.data.preparation.shutil.disk_usage", lambda path: usage)
    texts = (raw / "en").iterdir()
    needed = sum(path.stat().st_size * (0.6 if path.suffix == ".gz" else 0.25) * 2 for path in texts)

    with pytest.raises(DataError, match=r"data needs .* GB; its disk has 0\.0 GB left"):
        prepare(raw, tmp_path / "data", corpus())
    assert not list((tmp_path / "data").rglob("*.bin*"))
    usage.free = int(needed)
    prepare(raw, tmp_path / "data", corpus())


def test_too_few_documents_to_evaluate(raw, tmp_path):
    write(raw / "en" / "val.1.json.gz", TEXTS[:3])

    with pytest.raises(DataError, match=r"val\.1\.json\.gz ends with document 9, expected 10"):
        prepare(raw, tmp_path / "data", corpus())


def test_missing_text_files_are_named(raw, tmp_path):
    (raw / "en" / "train.3.json").unlink()
    with pytest.raises(DataError, match=r"en/train\.3\.json is missing, though others"):
        open_raw(raw, corpus())
    (raw / "en" / "train.0.json.gz").unlink()
    with pytest.raises(DataError, match=r"holds neither text \(train\.0\.json\.gz …\) nor c4\.en_6_text\.bin"):
        open_raw(raw, corpus())
    with pytest.raises(DataError, match="does not exist"):
        open_raw(tmp_path / "nowhere", corpus())


def test_text_needs_its_tokenizer(raw):
    (raw / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is no tokenizer\.json"):
        prepare(raw, raw / "data", corpus())
    (raw / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        open_raw(raw, corpus())


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "spm.model"])
def test_synthetic_data_are_prepared_like_real_data(tmp_path, tokenizer):
    """Of some of Python's documentation; the files of the evaluation hold more documents than it takes."""
    what = corpus(tokenizer, 99_999)
    options = SyntheticText(train=200, eval=5, row_length=64, vocabulary=400, files=2)
    made = generate(tmp_path / "raw", what, options)
    found = prepare(tmp_path / "raw", tmp_path / "data", what)

    assert found.synthetic
    assert found.counts["vocabulary"] == 400
    assert made == ", ".join(
        f"{found.counts[f'{split}_documents']} documents of {found.counts[f'{split}_tokens']} tokens to {split}"
        for split in ("train", "eval")
    )
    assert (found.counts["train_tokens"] - 2) // 64 >= 200
    assert (found.counts["eval_tokens"] - 1) // 64 >= 5
    assert sorted(path.name for path in (tmp_path / "raw").glob("*.json*") if "tok" not in path.name) == sorted(
        name for part in what.parts for name in part.files
    )
    held = sum(len(list(read_documents(tmp_path / "raw" / name))) for name in what.parts[2].files)
    assert held > found.counts["eval_documents"]
    assert generate(tmp_path / "again", what, options) == made
    for path in (tmp_path / "raw").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_impossible_sizes_of_synthetic_data(tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.synthetic.documentation", lambda: iter([("x", TEXTS)] * 20))
    with pytest.raises(ConfigError, match="--vocabulary=200: at least 256"):
        generate(tmp_path / "raw", corpus(), SyntheticText(vocabulary=200))
    with pytest.raises(ConfigError, match="--vocabulary=5000: the text makes"):
        generate(tmp_path / "raw", corpus(), SyntheticText(vocabulary=5000))
    with pytest.raises(ConfigError, match=r"--train: it takes .* more than Python's documentation has"):
        generate(tmp_path / "raw", corpus(), SyntheticText(train=10**7, eval=1, row_length=32, vocabulary=300))
    with pytest.raises(ConfigError, match="--eval=0: at least 1"):
        SyntheticText(eval=0)
    (tmp_path / "raw").mkdir(exist_ok=True)
    (tmp_path / "raw" / "x").write_text("")
    with pytest.raises(DataError, match="is not empty"):
        generate(tmp_path / "raw", corpus())


def test_a_garbled_marker_of_synthetic_data(raw, tmp_path):
    synthetic.mark(raw, {"settings": {"vocabulary": 0}})
    with pytest.raises(DataError, match="invalid settings: vocabulary=0"):
        open_raw(raw, corpus())


def test_the_commands(raw, tmp_path, capsys):
    what = corpus(sizes={"c4.en_6_text.idx": 42 + 20 * 10, "c4.en_7_text.idx": 42 + 20 * 11})
    commands = commands_for(what)
    data = str(tmp_path / "data")

    assert commands.run("prepare", ["--raw-dir", str(raw), "--data-dir", data, "--workers", "1"]) == 0
    assert commands.run("verify", ["--data-dir", data]) == 0
    shown = capsys.readouterr().out
    assert shown.count("C4, vocabulary 300") == 1
    assert shown.count("data in place of C4") == 2
    assert shown.count("not the benchmark's data, for the open division alone: c4.en_7_text.idx has 242 bytes") == 2
    assert shown.endswith("as published: 1 files\n")
    assert "c4.en_6_text.idx has" not in shown
