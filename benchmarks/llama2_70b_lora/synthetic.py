"""Generate synthetic raw data: reports and summaries in a synthetic language, a tokenizer, and a small base.

The base is pre-trained on one language; the reports and summaries are in another language with the same words
(:mod:`benchmarks.llama2_70b_lora.markov`). Fine-tuning can reduce the loss at most by the difference between the loss
of the base on the second language and the entropy of this language. The file ``STAND_IN`` contains both numbers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from benchmarks.llama2_70b_lora.base import save_base
from benchmarks.llama2_70b_lora.markov import Language, languages
from benchmarks.llama2_70b_lora.preparation.examples import encoded, prompt
from benchmarks.llama2_70b_lora.preparation.packing import PROCESSES, Example, Rows, pack, pieces
from benchmarks.llama2_70b_lora.pretraining import mean_of_rows, pretrain
from benchmarks.llama2_70b_lora.raw import BASE, SPLITS, TOKENIZER, Settings
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.language.architecture import LlamaArchitecture

SPECIAL_PIECES = 3 + 256
"""Number of special pieces: unknown, BOS, EOS, and one for each byte."""
TOO_LONG, LONG = 0.02, 0.1
"""Fractions of reports that are longer than a row, which the preparation drops, and of reports that take most of a row
and have a summary of few words, which give rows with few scored tokens."""
PRETRAINING_BATCH = 8
_TRAIN, _EVAL, _PRETRAINING, _TOKENIZER, _WORDS = range(5)  # a separate random generator for each purpose


@dataclass(frozen=True)
class SyntheticReports(Options):
    """Options of ``generate``. The vocabulary is that of the model; the tokenizer may have fewer tokens."""

    train: Annotated[int, Option("rows to train on", least=1)] = 1024
    eval: Annotated[int, Option("rows to evaluate", least=1)] = 173
    row_length: Annotated[int, Option("tokens of a row, which holds a report and its summary", least=64)] = 128
    vocabulary: Annotated[int, Option("vocabulary size of the base", least=1)] = 512
    words: Annotated[int, Option("words of the language", least=1)] = 64
    classes: Annotated[int, Option("classes of words", least=1)] = 8
    layers: Annotated[int, Option("layers of the base", least=1)] = 2
    hidden: Annotated[int, Option("hidden size of the base", least=1)] = 64
    heads: Annotated[int, Option("heads of queries", least=1)] = 4
    kv_heads: Annotated[int, Option("heads of keys and values", least=1)] = 2
    feed_forward: Annotated[int, Option("hidden size of the MLP", least=1)] = 128
    steps: Annotated[int, Option(f"steps of pre-training, each of {PRETRAINING_BATCH} rows", least=1)] = 300
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.heads:
            raise ConfigError(f"--heads={self.heads} does not divide --hidden={self.hidden}")
        _ = self.architecture  # raises an error for invalid heads
        if self.vocabulary < (least := SPECIAL_PIECES + self.words):
            raise ConfigError(f"--vocabulary={self.vocabulary}: at least {least}, for bytes and {self.words} words")

    @property
    def settings(self) -> Settings:
        """Sizes for the preparation of these data."""
        return Settings(self.row_length, self.vocabulary, self.train, self.eval)

    @property
    def architecture(self) -> LlamaArchitecture:
        """Architecture of the base."""
        return LlamaArchitecture(
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


def generate(raw_dir: Path, options: SyntheticReports = SyntheticReports()) -> str:
    """Write ``train.jsonl``, ``validation.jsonl``, ``tokenizer.model`` and ``base`` to ``raw_dir``.

    Returns:
        a summary: examples, loss of the base on the evaluation rows, and entropy, which is the lowest possible loss.

    Raises:
        ConfigError: the sizes are inconsistent.
        DataError: the folder is not empty.
    """
    known, other = languages(options.classes, options.words, _random(options, _WORDS))
    with synthetic.generated(raw_dir) as partial:
        model = _tokenizer(options, known)
        (partial / TOKENIZER).write_bytes(model)
        tokenizer = SentencePieceProcessor(model_proto=model)
        examples = {}
        for split, count, purpose in (("train", options.train, _TRAIN), ("eval", options.eval, _EVAL)):
            texts, evaluation = _texts(options, other, tokenizer, split, count, purpose)
            lines = (json.dumps({"input": report, "output": summary}) + "\n" for report, summary in texts)
            (partial / f"{SPLITS[split]}.jsonl").write_text("".join(lines), encoding="utf-8")
            examples[split] = len(texts)
        rows_wanted = min(options.steps * PRETRAINING_BATCH, 4 * options.train)
        _, rows = _texts(options, known, tokenizer, "train", rows_wanted, _PRETRAINING)
        weights = pretrain(options.architecture, rows.tokens, options.steps, options.seed, PRETRAINING_BATCH)
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
        save_base(partial / BASE, weights.items(), options.architecture, options.row_length)
        wide = {name: weight.float() for name, weight in weights.items()}
        loss = mean_of_rows(options.architecture, wide, evaluation.tokens, evaluation.scored)
        description = {**asdict(options), "base_loss": round(loss, 4), "entropy": round(other.entropy, 4)}
        synthetic.mark(partial, {"settings": asdict(options.settings), "request": description})
    counts = ", ".join(f"{count} examples to {split}" for split, count in examples.items())
    return f"{counts}; loss of the base {loss:.3f}, entropy of the language {other.entropy:.3f} nats"


def _texts(
    options: SyntheticReports,
    language: Language,
    tokenizer: SentencePieceProcessor,
    split: str,
    rows: int,
    purpose: int,
) -> tuple[list[tuple[str, str]], Rows]:
    """Return reports and summaries that give at least ``rows`` rows, and the first ``rows`` of these rows."""
    texts: list[tuple[str, str]] = []
    examples: list[Example] = []
    drawn = _examples(options, language, _random(options, purpose))
    while True:
        more = [next(drawn) for _ in range(64)]
        texts += more
        examples += [e for e in encoded(iter(more), tokenizer) if len(e.tokens) <= options.row_length]
        tokens = sum(len(example.tokens) for example in examples)
        lost = len(list(pieces(len(examples), PROCESSES[split])))  # each piece drops less than one row
        if tokens // options.row_length >= rows + lost:
            packed = pack(examples, options.row_length, PROCESSES[split], answers_only=split == "eval")
            return texts, Rows(packed.tokens[:rows], packed.scored[:rows])


def _examples(
    options: SyntheticReports, language: Language, generator: np.random.Generator
) -> Iterator[tuple[str, str]]:
    """Yield reports and summaries endlessly."""
    length = options.row_length
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


def _tokenizer(options: SyntheticReports, language: Language) -> bytes:
    """Train a SentencePiece model (BPE with byte fallback, as for Llama) with one piece per word; return its bytes.

    Raises:
        ConfigError: the vocabulary is too small for one piece per word.
    """
    drawn = _examples(options, language, _random(options, _TOKENIZER))
    texts = [next(drawn) for _ in range(50 + 10 * options.words)]
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in f"{prompt(text[0])} {text[1]}".splitlines()),
        model_writer=written,
        model_type="bpe",
        vocab_size=options.vocabulary,
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
            f"--vocabulary={options.vocabulary}: too small for a piece for each of {options.words} words; "
            f"{len(split)} are split"
        )
    return model


def _random(options: SyntheticReports, purpose: int) -> np.random.Generator:
    return np.random.default_rng((options.seed, purpose))
