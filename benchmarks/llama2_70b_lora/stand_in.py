"""A stand-in in the raw format: reports and summaries in a made-up language, a tokenizer, and a small base.

The base is pre-trained on one language; reports and summaries, to train on and to evaluate, are in another of the same
words (:mod:`benchmarks.llama2_70b_lora.markov`). What fine-tuning can gain at most is the entropy gap: the base's loss
on the second language less that language's entropy. ``STAND_IN`` says both.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from benchmarks.llama2_70b_lora.base import save_base
from benchmarks.llama2_70b_lora.markov import Language, languages
from benchmarks.llama2_70b_lora.preparation.examples import encoded, prompt
from benchmarks.llama2_70b_lora.preparation.packing import PROCESSES, Example, Rows, pack, pieces
from benchmarks.llama2_70b_lora.pretraining import mean_of_rows, pretrain
from benchmarks.llama2_70b_lora.raw import BASE, SPLITS, TOKENIZER, Settings
from common.data import stand_in
from common.errors import ConfigError
from common.nn.decoder import DecoderArchitecture

SPECIAL_PIECES = 3 + 256
"""Unknown, BOS, EOS, and a piece for each byte."""
TOO_LONG, LONG = 0.02, 0.1
"""Shares of the reports that are longer than a row, and left out by the preparation, and of those that nearly fill one,
with summaries of a few words: rows with few scored tokens."""
PRETRAINING_BATCH = 8
_TRAIN, _EVAL, _PRETRAINING, _TOKENIZER, _WORDS = range(5)  # purposes of random numbers


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        train, eval: rows of each split.
        row_length: tokens of a row.
        vocabulary: tokens of the model; the tokenizer has as many or fewer.
        words, classes: of the language.
        layers, hidden, heads, kv_heads, feed_forward: of the base.
        steps: of its pre-training, at 8 rows.
        seed: decides everything else.
    """

    train: int = 1024
    eval: int = 173
    row_length: int = 128
    vocabulary: int = 512
    words: int = 64
    classes: int = 8
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 128
    steps: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "seed" else 1):
                raise ConfigError(f"--{name.replace('_', '-')}={value}: too few")
        if self.row_length < 64:
            raise ConfigError(f"--row-length={self.row_length}: at least 64, to hold a report and its summary")
        if self.hidden % self.heads:
            raise ConfigError(f"--heads={self.heads} does not divide --hidden={self.hidden}")
        _ = self.architecture  # refuses impossible heads
        if self.vocabulary < (least := SPECIAL_PIECES + self.words):
            raise ConfigError(f"--vocabulary={self.vocabulary}: at least {least}, for bytes and {self.words} words")

    @property
    def settings(self) -> Settings:
        """What the stand-in is prepared with."""
        return Settings(self.row_length, self.vocabulary, self.train, self.eval)

    @property
    def architecture(self) -> DecoderArchitecture:
        """Of the base."""
        return DecoderArchitecture(
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.hidden // self.heads,
            feed_forward=self.feed_forward,
            norm_epsilon=1e-5,
            rope_base=10000.0,
            initializer_range=0.02,
        )


@dataclass(frozen=True)
class Generated:
    """What was written: examples of each split, the base's loss on the evaluation rows, and the least possible one."""

    examples: dict[str, int]
    base_loss: float
    entropy: float

    def __str__(self) -> str:
        counts = ", ".join(f"{count} examples to {split}" for split, count in self.examples.items())
        return f"{counts}; loss of the base {self.base_loss:.3f}, entropy of the language {self.entropy:.3f} nats"


def generate(raw_dir: Path, request: Request = Request()) -> Generated:
    """Write ``train.jsonl``, ``validation.jsonl``, ``tokenizer.model`` and ``base`` to ``raw_dir``.

    Raises:
        ConfigError: the sizes do not fit one another.
        DataError: the folder is not empty.
    """
    stand_in.require_unused(raw_dir)
    known, other = languages(request.classes, request.words, _random(request, _WORDS))
    with stand_in.generated(raw_dir) as partial:
        model = _tokenizer(request, known)
        (partial / TOKENIZER).write_bytes(model)
        tokenizer = SentencePieceProcessor(model_proto=model)
        examples = {}
        for split, count, purpose in (("train", request.train, _TRAIN), ("eval", request.eval, _EVAL)):
            texts, evaluation = _texts(request, other, tokenizer, split, count, purpose)
            lines = (json.dumps({"input": report, "output": summary}) + "\n" for report, summary in texts)
            (partial / f"{SPLITS[split]}.jsonl").write_text("".join(lines), encoding="utf-8")
            examples[split] = len(texts)
        rows_wanted = min(request.steps * PRETRAINING_BATCH, 4 * request.train)
        _, rows = _texts(request, known, tokenizer, "train", rows_wanted, _PRETRAINING)
        weights = pretrain(request.architecture, rows.tokens, request.steps, request.seed, PRETRAINING_BATCH)
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
        save_base(partial / BASE, weights.items(), request.architecture, request.row_length)
        wide = {name: weight.float() for name, weight in weights.items()}
        loss = mean_of_rows(request.architecture, wide, evaluation.tokens, evaluation.scored)
        made = Generated(examples, loss, other.entropy)
        description = {**asdict(request), "base_loss": round(loss, 4), "entropy": round(other.entropy, 4)}
        stand_in.mark(partial, {"settings": asdict(request.settings), "request": description})
    return made


def _texts(
    request: Request, language: Language, tokenizer: SentencePieceProcessor, split: str, rows: int, purpose: int
) -> tuple[list[tuple[str, str]], Rows]:
    """Reports and summaries that make at least ``rows`` rows, and the first so many of them."""
    texts: list[tuple[str, str]] = []
    examples: list[Example] = []
    drawn = _examples(request, language, _random(request, purpose))
    while True:
        more = [next(drawn) for _ in range(64)]
        texts += more
        examples += [e for e in encoded(iter(more), tokenizer) if len(e.tokens) <= request.row_length]
        tokens = sum(len(example.tokens) for example in examples)
        lost = len(list(pieces(len(examples), PROCESSES[split])))  # rows, less than one a piece
        if tokens // request.row_length >= rows + lost:
            packed = pack(examples, request.row_length, PROCESSES[split], answers_only=split == "eval")
            return texts, Rows(packed.tokens[:rows], packed.scored[:rows])


def _examples(request: Request, language: Language, generator: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Reports and summaries without end."""
    length = request.row_length
    while True:
        kind = generator.random()
        if kind < TOO_LONG:
            report, summary = (length, length + 8), (1, 4)
        elif kind < TOO_LONG + LONG:
            report, summary = (length // 2, 2 * length // 3), (1, 4)
        else:
            report, summary = (length // 8, length // 4), (length // 8, length // 3)
        counts = [int(generator.integers(*words)) for words in (report, summary)]
        yield language.text(counts[0], generator), language.text(counts[1], generator)


def _tokenizer(request: Request, language: Language) -> bytes:
    """A SentencePiece model like Llama's (pairs of pieces merged, unknown characters as bytes) with a piece a word.

    Raises:
        ConfigError: the vocabulary is too small for a piece a word.
    """
    drawn = _examples(request, language, _random(request, _TOKENIZER))
    texts = [next(drawn) for _ in range(50 + 10 * request.words)]
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in f"{prompt(text[0])} {text[1]}".splitlines()),
        model_writer=written,
        model_type="bpe",
        vocab_size=request.vocabulary,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        shuffle_input_sentence=False,
        minloglevel=2,
    )
    model = written.getvalue()
    tokenizer = SentencePieceProcessor(model_proto=model)
    if split := [word for word in language.words if len(tokenizer.encode(word)) > 1]:
        raise ConfigError(
            f"--vocabulary={request.vocabulary}: too small for a piece for each of {request.words} words; "
            f"{len(split)} are split"
        )
    return model


def _random(request: Request, purpose: int) -> np.random.Generator:
    return np.random.default_rng((request.seed, purpose))
