"""Synthetic data in LibriSpeech's layout: random sentences of English words, in synthesised speech.

``small`` has few short words, which a small network can learn. Its evaluation sentences are not among the training
sentences, and have other voices. ``librispeech-sized`` is for benchmarks: lengths, and word pieces per second, are
about those of LibriSpeech.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import soundfile
from numpy.typing import NDArray

from benchmarks.rnnt import tokenizer
from benchmarks.rnnt.raw import EVAL_SUBSET, FOLDER, TRAIN_SUBSETS
from benchmarks.rnnt.synthesis import SAMPLE_RATE, draw_voice, speak
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError

Kind = Literal["small", "librispeech-sized"]
LONGEST = 32.7
"""Seconds of the longest evaluation utterance."""
PIECES_PER_SECOND = (4.6, 0.6)
"""Mean and standard deviation over LibriSpeech's utterances, with 1,023 pieces."""
SLOWEST, FASTEST = 2.8, 6.4
"""Range of pieces per second: at most 109 for the longest training utterance. LibriSpeech has at most 125."""
_CHAPTER = 64
"""Maximum utterances per chapter."""
_TEXTS, _VOICE = range(2)  # purposes of random numbers
_WORD = r"a|[a-z]+[a-z']*[a-z]"
_SHORT, _ANY = range(3, 7), range(1, 30)  # letters of a word
_USUAL_WORDS, _SAMPLE = 30, 8192
_ATTEMPTS = 1000


@dataclass(frozen=True)
class SyntheticSpeech(Options):
    """Options of ``generate``. None selects the default of the kind, which :meth:`completed` fills in.

    ``words`` are the most frequent ones of Python's documentation. ``sentence`` is only for ``small``.
    Each split has ``voices`` speakers of its own.
    """

    kind: Kind = "small"
    train: Annotated[int | None, Option("number of training utterances", least=1)] = None
    eval: Annotated[int | None, Option("number of evaluation utterances", least=1)] = None
    words: Annotated[int | None, Option("number of words of the synthetic language", least=2)] = None
    sentence: Annotated[
        tuple[int, int] | None, Option("smallest and largest number of words in a sentence", metavar=("LEAST", "MOST"))
    ] = None
    vocabulary: Annotated[int | None, Option("number of pieces of the tokenizer", least=1)] = None
    voices: Annotated[int | None, Option("number of speakers", least=1)] = None
    seed: Annotated[int, Option(least=0)] = 0

    def completed(self) -> SyntheticSpeech:
        """Return the options with defaults for all values that are None.

        Raises:
            ConfigError: the values are inconsistent.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        whole = SyntheticSpeech(**{**USUAL[self.kind], **given})
        assert whole.sentence is not None
        least, most = whole.sentence
        if not 1 <= least <= most:
            raise ConfigError(f"--sentence {least} {most}: LEAST is at least 1, and MOST at least LEAST")
        return whole


USUAL: dict[str, dict[str, Any]] = {
    "small": {"train": 1024, "eval": 128, "words": 24, "sentence": (2, 5), "vocabulary": 32, "voices": 16},
    "librispeech-sized": {
        "train": 4096,
        "eval": 2703,
        "words": 20_000,
        "sentence": (1, 1),
        "vocabulary": 1023,
        "voices": 64,
    },
}
"""Defaults of each kind."""


@dataclass(frozen=True)
class _Chapter:
    """Utterances of one voice.

    Attributes:
        voice: seed of the voice.
        texts: each with its duration in seconds, or None if the voice's tempo decides.
    """

    folder: Path
    voice: tuple[int, ...]
    texts: tuple[tuple[str, float | None], ...]

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}-{self.folder.name}"


def generate(raw_dir: Path, options: SyntheticSpeech = SyntheticSpeech(), workers: int = 1) -> str:
    """Write ``LibriSpeech/train-clean-100`` and ``LibriSpeech/dev-clean`` to ``raw_dir``, an empty or new folder.

    Returns:
        Summary with utterances and hours of each split.

    Raises:
        ConfigError: a number is out of range, or the words allow too few sentences.
        DataError: the folder is not empty, or a process was killed.
    """
    options = options.completed()
    with synthetic.generated(raw_dir) as folder:
        texts = _sentences(options) if options.kind == "small" else _passages(options)
        subsets = {"train": TRAIN_SUBSETS[0], "eval": EVAL_SUBSET}
        chapters = {
            split: list(_chapters(folder / FOLDER / subsets[split], number, texts[split], options))
            for number, split in enumerate(subsets)
        }
        plans = [chapter for split in subsets for chapter in chapters[split]]
        lengths = iter(list(synthetic.drawn(write_chapter, plans, workers)))
        hours = {split: sum(next(lengths) for _ in chapters[split]) / 3600 for split in subsets}
        synthetic.mark(folder, {"vocabulary": options.vocabulary, "request": asdict(options)})
    return ", ".join(f"{split}: {len(texts[split])} utterances, {hours[split]:.2f} h" for split in subsets)


def write_chapter(chapter: _Chapter) -> float:
    """Write the FLAC files and the transcripts of one chapter, and return their duration in seconds."""
    voice = draw_voice(np.random.default_rng(chapter.voice))
    chapter.folder.mkdir(parents=True)
    lines = []
    samples = 0
    for number, (text, seconds) in enumerate(chapter.texts):
        name = f"{chapter.name}-{number:04d}"
        random = np.random.default_rng((*chapter.voice, int(chapter.folder.name), number))
        spoken_N = speak(text, voice, random, seconds)
        soundfile.write(chapter.folder / f"{name}.flac", spoken_N, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        samples += len(spoken_N)
        lines.append(f"{name} {text.upper()}\n")
    (chapter.folder / f"{chapter.name}.trans.txt").write_text("".join(lines), encoding="utf-8")
    return samples / SAMPLE_RATE


def frequent_words(count: int, letters: range) -> dict[str, int]:
    """Return the most frequent words of Python's documentation, with their frequencies.

    Args:
        count: maximum number of words.
        letters: allowed numbers of letters.
    """
    counts = _counted_words()
    ranked = sorted((word for word in counts if len(word) in letters), key=lambda word: (-counts[word], word))
    return {word: counts[word] for word in ranked[:count]}


@functools.cache
def _counted_words() -> Counter[str]:
    counts: Counter[str] = Counter()
    for _, paragraphs in synthetic.documentation():
        for text in paragraphs:
            found = re.findall(r"[a-z']+", text.lower())
            counts.update(word for word in found if re.fullmatch(_WORD, word))
    return counts


def _sentences(options: SyntheticSpeech) -> dict[str, list[tuple[str, float | None]]]:
    """Return sentences of few words; evaluation sentences are not among the training sentences."""
    assert options.words is not None
    assert options.sentence is not None
    assert options.train is not None
    assert options.eval is not None
    least, most = options.sentence
    words = list(frequent_words(options.words, _SHORT))
    random = np.random.default_rng((options.seed, _TEXTS))

    def sentence() -> str:
        length = int(random.integers(least, most + 1))
        return " ".join(words[index] for index in random.integers(len(words), size=length))

    train = [sentence() for _ in range(options.train)]
    known = set(train)
    held_out: list[tuple[str, float | None]] = []
    while len(held_out) < options.eval:
        text = sentence()
        for _ in range(_ATTEMPTS):
            if text not in known:
                break
            text = sentence()
        else:
            raise ConfigError(
                f"--words={len(words)} --sentence {least} {most}: too few sentences for {options.train} of training "
                "and others for evaluation"
            )
        held_out.append((text, None))
    return {"train": [(text, None) for text in train], "eval": held_out}


def _passages(options: SyntheticSpeech) -> dict[str, list[tuple[str, float | None]]]:
    """Return texts for given durations, with words as frequent as in the documentation.

    The pieces of a word depend on the tokenizer, which depends on the texts. A first tokenizer, trained on texts of
    typical length, determines the number of words per text; a second one, trained on these texts, corrects it.
    """
    assert options.words is not None
    assert options.vocabulary is not None
    assert options.train is not None
    assert options.eval is not None
    counts = frequent_words(options.words, _ANY)
    words, cumulative = list(counts), np.cumsum(list(counts.values()))
    random = np.random.default_rng((options.seed, _TEXTS))
    seconds = {"train": train_seconds(options.train, random), "eval": eval_seconds(options.eval, random)}
    wanted, drawn = {}, {}
    for split, seconds_N in seconds.items():
        rate_N = np.clip(random.normal(*PIECES_PER_SECOND, len(seconds_N)), SLOWEST, FASTEST)
        wanted[split] = seconds_N * rate_N
        drawn[split] = [  # a word has at least one piece
            np.searchsorted(cumulative, random.integers(cumulative[-1], size=math.ceil(pieces)), "right")
            for pieces in wanted[split]
        ]
    texts = {"train": [indices[:_USUAL_WORDS] for indices in drawn["train"]]}
    for _ in range(2):
        sample = (" ".join(words[index] for index in indices) for indices in texts["train"][:_SAMPLE])
        pieces_W = _pieces_of(words, tokenizer.train(sample, options.vocabulary))
        texts = {
            split: [
                _first(indices, pieces_W[indices], pieces)
                for indices, pieces in zip(drawn[split], wanted[split], strict=True)
            ]
            for split in seconds
        }
    return {
        split: [
            (" ".join(words[index] for index in indices), float(length))
            for indices, length in zip(texts[split], seconds[split], strict=True)
        ]
        for split in seconds
    }


def _first(words: NDArray[np.int64], pieces: NDArray[np.int64], wanted: float) -> NDArray[np.int64]:
    """Return the first words, at least one, whose total number of pieces comes closest to ``wanted``."""
    middles = np.cumsum(pieces) - pieces / 2
    return words[: max(1, int(np.searchsorted(middles, wanted, "right")))]


def _pieces_of(words: list[str], model: bytes) -> NDArray[np.int64]:
    """Return the number of pieces of each word, (W,)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(model)
        return np.array([len(pieces) for pieces in tokenizer.TranscriptTokenizer(path).encode(words)])


def train_seconds(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return (count,) durations like those of training utterances: 1 to 17 s, mean 12.3 s, most near the maximum."""
    return 1.0 + 16.0 * random.beta(1.89, 0.79, count)


def eval_seconds(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return (count,) durations like those of dev-clean: 1.4 to 32.7 s, mean 7.2 s."""
    return np.clip(random.lognormal(np.log(5.9), 0.63, count), 1.4, LONGEST)


def _chapters(
    folder: Path, split: int, texts: list[tuple[str, float | None]], options: SyntheticSpeech
) -> Iterator[_Chapter]:
    """Assign texts to voices in turn, and divide the texts of each voice into chapters."""
    assert options.voices is not None
    for speaker in range(options.voices):
        own = texts[speaker :: options.voices]
        number = 1 + speaker + split * options.voices
        for chapter, first in enumerate(range(0, len(own), _CHAPTER)):
            yield _Chapter(
                folder / str(number) / str(1000 + chapter),
                (options.seed, _VOICE, number),
                tuple(own[first : first + _CHAPTER]),
            )
