"""Generate synthetic raw data: reports and summaries in a synthetic language, a tokenizer, and a small base.

A language is a random walk over classes of synthetic words. Each class has a favourite successor class with high
probability; all other classes are equally likely. The choice of the word within a class does not depend on the previous
word. So the entropy is known, and two languages with the same words but different favourites differ by a function with
one dimension per class, which low-rank adapters can learn.

The base is pre-trained on one language for some seconds; the reports and summaries are in another language with the
same words. Fine-tuning can reduce the loss at most by the difference between the loss of the base on the second
language and the entropy of this language. The file ``SYNTHETIC`` contains both numbers.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from torch import Tensor

from benchmarks.llama2_70b_lora.base import save_base
from benchmarks.llama2_70b_lora.preparation.examples import encoded, prompt
from benchmarks.llama2_70b_lora.preparation.packing import PROCESSES, Example, PackedExamples, pack, pieces
from benchmarks.llama2_70b_lora.raw import BASE, SPLITS, TOKENIZER, RowSettings
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.language.architecture import LlamaArchitecture
from common.language.network import Decoder

FAVOURITE = 0.85
"""Probability of the favourite successor."""
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = 2


@dataclass(frozen=True)
class Language:
    """Language with C classes of M words each.

    Attributes:
        words: all C * M words, sorted by class.
        successors: favourite successor of each class: a permutation, so that all classes are equally frequent.
    """

    words: tuple[str, ...]
    successors: NDArray[np.int64]

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return len(self.successors)

    @property
    def entropy(self) -> float:
        """Entropy rate in nats per word: the lowest possible loss of a model."""
        others = (1 - FAVOURITE) / (self.classes - 1)
        of_class = -FAVOURITE * np.log(FAVOURITE) - (1 - FAVOURITE) * np.log(others)
        word_M = self._frequencies
        return float(of_class - (word_M * np.log(word_M)).sum())

    def text(self, words: int, generator: np.random.Generator) -> str:
        """Return a random walk of ``words`` words, which starts in a random class."""
        strays = generator.random(words) >= FAVOURITE
        steps = generator.integers(1, self.classes, words)
        of_class = generator.choice(len(self._frequencies), words, p=self._frequencies)
        current, made = int(generator.integers(self.classes)), []
        for stray, step, word in zip(strays.tolist(), steps.tolist(), of_class.tolist(), strict=True):
            current = int(self.successors[current])
            if stray:  # not the favourite, but one of the other classes
                current = (current + step) % self.classes
            made.append(self.words[current * len(self._frequencies) + word])
        return " ".join(made)

    @property
    def _frequencies(self) -> NDArray[np.float64]:
        """Probabilities of the words in a class: that of the n-th word is proportional to 1 / n (Zipf's law)."""
        weight_M = 1.0 / np.arange(1, len(self.words) // self.classes + 1)
        return weight_M / weight_M.sum()


def languages(classes: int, words: int, generator: np.random.Generator) -> tuple[Language, Language]:
    """Return two languages with the same ``words`` words, in which every class has different favourites.

    Raises:
        ConfigError: there are fewer than 3 classes, they do not divide ``words``, or ``words`` is too large.
    """
    if classes < 3 or words % classes:
        raise ConfigError(f"--words={words} in --classes={classes}: at least 3 classes, of equally many words")
    vocabulary = _words(words, generator)
    order = generator.permutation(classes)
    first_C, second_C = np.empty(classes, np.int64), np.empty(classes, np.int64)
    first_C[order] = np.roll(order, -1)
    second_C[order] = np.roll(order, -2)
    return Language(vocabulary, first_C), Language(vocabulary, second_C)


def _words(count: int, generator: np.random.Generator) -> tuple[str, ...]:
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    if count > len(syllables) ** SYLLABLES // 2:
        raise ConfigError(f"--words={count}: at most {len(syllables) ** SYLLABLES // 2} can be formed")
    numbers = generator.choice(len(syllables) ** SYLLABLES, count, replace=False)
    return tuple(_word(int(number), syllables) for number in numbers)


def _word(number: int, syllables: Sequence[str]) -> str:
    made = ""
    for _ in range(SYLLABLES):
        number, syllable = divmod(number, len(syllables))
        made += syllables[syllable]
    return made


LEARNING_RATE = 4e-3
WARMUP = 0.1
"""Fraction of the steps in which the learning rate rises; then it falls to 0 as a cosine."""


def pretrain(
    architecture: LlamaArchitecture, rows_RS: NDArray[np.int32], steps: int, seed: int, batch: int = 8
) -> dict[str, Tensor]:
    """Return the weights of a decoder that was trained to predict every next token in ``rows_RS``.

    Args:
        rows_RS: rows of tokens; repeated if necessary.
        batch: rows per step of AdamW.

    Returns:
        Parameters by name, fp32, in host memory.
    """

    def generator_of(name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    model = Decoder(architecture)
    model.initialise(generator_of)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.01)
    warmup = max(1, round(WARMUP * steps))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(steps):
        numbers = np.arange(step * batch, (step + 1) * batch) % len(rows_RS)
        mean = next_token_losses(model, torch.from_numpy(rows_RS[numbers]).long()).mean()
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def next_token_losses(model: Decoder, tokens_BS: Tensor) -> Tensor:
    """Return the cross-entropy (B, S - 1) in nats of each token except the first of a row."""
    logits_BSV = model.forward_logits(tokens_BS)[:, :-1]
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="none").view(
        len(tokens_BS), -1
    )


@torch.no_grad()
def mean_of_rows(
    architecture: LlamaArchitecture,
    weights: dict[str, Tensor],
    tokens_RS: NDArray[np.int32],
    scored_RS: NDArray[np.bool_],
    batch: int = 16,
) -> float:
    """Return the metric of the benchmark for a base: the mean over rows of the mean loss of scored tokens, in nats."""
    model = Decoder(architecture)
    model.load_state_dict(weights)
    means: list[Tensor] = []
    for first in range(0, len(tokens_RS), batch):
        losses = next_token_losses(model, torch.from_numpy(tokens_RS[first : first + batch]).long()).double()
        marks = torch.from_numpy(scored_RS[first : first + batch, 1:]).double()
        means.append(((losses * marks).sum(1) / marks.sum(1))[marks.sum(1) > 0])
    return float(torch.cat(means).mean())


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

    train: Annotated[int, Option("number of training rows", least=1)] = 1024
    eval: Annotated[int, Option("number of evaluation rows", least=1)] = 173
    row_length: Annotated[int, Option("tokens per row, which has a report and its summary", least=64)] = 128
    vocabulary: Annotated[int, Option("vocabulary size of the base model", least=1)] = 512
    words: Annotated[int, Option("number of words of the synthetic language", least=1)] = 64
    classes: Annotated[int, Option("number of word classes", least=1)] = 8
    layers: Annotated[int, Option("layers of the base model", least=1)] = 2
    hidden: Annotated[int, Option("hidden size of the base model", least=1)] = 64
    heads: Annotated[int, Option("number of query heads", least=1)] = 4
    kv_heads: Annotated[int, Option("number of key and value heads", least=1)] = 2
    feed_forward: Annotated[int, Option("hidden size of the MLP", least=1)] = 128
    steps: Annotated[
        int, Option(f"pre-training steps of the base model, with {PRETRAINING_BATCH} rows each", least=1)
    ] = 300
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.heads:
            raise ConfigError(f"--heads={self.heads} does not divide --hidden={self.hidden}")
        _ = self.architecture  # raises an error for invalid heads
        if self.vocabulary < (least := SPECIAL_PIECES + self.words):
            raise ConfigError(f"--vocabulary={self.vocabulary}: at least {least}, for bytes and {self.words} words")

    @property
    def settings(self) -> RowSettings:
        """Sizes for the preparation of these data."""
        return RowSettings(self.row_length, self.vocabulary, self.train, self.eval)

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
) -> tuple[list[tuple[str, str]], PackedExamples]:
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
            return texts, PackedExamples(packed.tokens[:rows], packed.scored[:rows])


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
