"""Synthetic data in C4's format: the documentation of Python's standard library, and a tokenizer trained on it."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from common.data import synthetic
from common.data.megatron.corpus import Corpus, SyntheticSizes, open_tokenizer
from common.data.options import Option, Options
from common.errors import ConfigError

BYTES = 256
SPECIAL_PIECES = 3
"""Padding, end of text and unknown: tokens 0, 1 and 2 as in the benchmark's SentencePiece model."""
_MERGED, _MERGED_SHARE = 40, 0.01  # number of documents that are appended to a document; fraction of such documents
_NOT_TAKEN = 5  # unused documents at the end of the evaluation files
_EVAL_FILES = 2
_AT_ONCE = 256
_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN = 200_000, 12


@dataclass(frozen=True)
class SyntheticText(Options):
    """Options of ``generate``. Parts have at least as many rows as asked for. The seed orders the documents."""

    train: Annotated[int, Option("number of training rows, all files together", least=1)] = 2048
    eval: Annotated[int, Option("number of evaluation rows", least=1)] = 64
    row_length: Annotated[int, Option("tokens per row", least=1)] = 128
    vocabulary: Annotated[int, Option("number of tokens of the tokenizer", least=1)] = 1024
    files: Annotated[int, Option("number of text files per training part", least=1)] = 2
    seed: Annotated[int, Option(least=0)] = 0


def generate(raw_dir: Path, corpus: Corpus, options: SyntheticText = SyntheticText()) -> str:
    """Write a tokenizer and text files in C4's format to ``raw_dir``.

    The evaluation files contain more documents than the evaluation uses.

    Returns:
        a summary: documents and tokens of each split.

    Raises:
        ConfigError: the vocabulary is too small, or Python's documentation is too short for the requested rows.
        DataError: the folder is not empty.
    """
    texts = list(_texts(np.random.default_rng(options.seed), _characters(options)))
    train_parts = [part for part in corpus.parts if part.split == "train"]
    eval_parts = [part for part in corpus.parts if part.split == "eval"]
    with synthetic.generated(raw_dir) as folder:
        train_tokenizer(folder / corpus.tokenizer, texts, options.vocabulary)
        encode = open_tokenizer(folder / corpus.tokenizer).encode
        chunks = (texts[first : first + _AT_ONCE] for first in range(0, len(texts), _AT_ONCE))
        lengths = [len(tokens) for chunk in chunks for tokens in encode(chunk)]
        evaluated = _count(lengths, options.eval * options.row_length + 1, "eval")
        first = evaluated + _NOT_TAKEN
        tokens = options.train * options.row_length + len(train_parts) * (options.row_length + 1)
        trained = _count(lengths[first:], tokens, "train")
        settings = SyntheticSizes(
            options.vocabulary,
            min(options.files, *(len(part.files) for part in corpus.parts if part.split == "train")),
            min(_EVAL_FILES, *(len(part.files) for part in eval_parts)),
            evaluated,
        )
        for part in eval_parts:
            _write(folder, settings.of(part).files, texts[:first])
        for part, share in zip(train_parts, _shares(texts[first : first + trained], len(train_parts)), strict=True):
            _write(folder, settings.of(part).files, share)
        synthetic.mark(folder, {"settings": asdict(settings), "request": asdict(options)})
    return (
        f"{trained} documents of {sum(lengths[first : first + trained])} tokens to train, "
        f"{evaluated} documents of {sum(lengths[:evaluated])} tokens to eval"
    )


def train_tokenizer(path: Path, texts: Sequence[str], vocabulary: int) -> None:
    """Train a tokenizer and write it to ``path``: byte-level BPE (``.json``), or SentencePiece (``.model``).

    Raises:
        ConfigError: ``vocabulary`` is too small, or too large for the texts.
    """
    if path.suffix == ".json":
        size = _train_byte_level(path, texts, vocabulary)
    else:
        size = _train_sentencepiece(path, texts, vocabulary)
    if size != vocabulary:
        raise ConfigError(f"--vocabulary={vocabulary}: the text makes {size} tokens")


def _train_byte_level(path: Path, texts: Iterable[str], vocabulary: int) -> int:
    """Train a byte-level BPE within words, as Llama 3's tokenizer; return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary < BYTES:
        raise ConfigError(f"--vocabulary={vocabulary}: at least {BYTES}, for all bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _train_sentencepiece(path: Path, texts: Iterable[str], vocabulary: int) -> int:
    """Train a SentencePiece model, write it to ``path`` and return the size of its vocabulary.

    The options are those of GPT-3 (mlcommons/training, retired_benchmarks/gpt3/paxml/utils/generate_spm.md).
    """
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    if vocabulary < BYTES + SPECIAL_PIECES + 64:
        raise ConfigError(f"--vocabulary={vocabulary}: at least {BYTES + SPECIAL_PIECES + 64}, for bytes and letters")
    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=written,
            model_type="bpe",
            vocab_size=vocabulary,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            split_digits=True,
            byte_fallback=True,
            character_coverage=0.9995,
            max_sentence_length=10000,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(f"--vocabulary={vocabulary}: {error}") from error
    path.write_bytes(written.getvalue())
    return int(SentencePieceProcessor(model_proto=written.getvalue()).vocab_size())


def _characters(options: SyntheticText) -> int:
    """Return an upper bound of the text that a request needs, because reading all documentation takes seconds."""
    return max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * (options.train + options.eval) * options.row_length)


def _texts(generator: np.random.Generator, characters: int) -> Iterator[str]:
    """Yield at least ``characters`` of documentation, or all, in random order; a few texts are many texts joined."""
    found: list[str] = []
    for _, paragraphs in synthetic.documentation():
        found.append("\n".join(paragraphs))
        characters -= len(found[-1])
        if characters <= 0:
            break
    shuffled = iter([found[index] for index in generator.permutation(len(found))])
    for text in shuffled:
        if generator.random() < _MERGED_SHARE:
            text = "\n".join([text, *itertools.islice(shuffled, _MERGED)])
        yield text


def _count(lengths: Sequence[int], tokens: int, split: str) -> int:
    """Return the number of documents, from the first on, that have at least ``tokens`` tokens in total."""
    ends = np.cumsum(lengths)
    if not len(ends) or ends[-1] < tokens:
        raise ConfigError(f"--{split}: it takes {tokens} tokens, more than Python's documentation has")
    return int(np.searchsorted(ends, tokens)) + 1


def _shares(texts: Sequence[str], count: int) -> list[Sequence[str]]:
    """Split ``texts`` into ``count`` contiguous parts of nearly equal length."""
    cuts = [len(texts) * number // count for number in range(count + 1)]
    return [texts[start:end] for start, end in itertools.pairwise(cuts)]


def _write(folder: Path, names: Sequence[str], texts: Sequence[str]) -> None:
    for name, share in zip(names, _shares(texts, len(names)), strict=True):
        data = "".join(json.dumps({"text": text}) + "\n" for text in share).encode()
        (folder / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
