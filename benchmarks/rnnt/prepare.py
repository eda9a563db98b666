"""Download, prepare, verify and generate the data of RNN-T: LibriSpeech as samples and word pieces.

:mod:`benchmarks.rnnt.raw` describes the input, :mod:`benchmarks.rnnt.prepared` the output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.rnnt import raw
from benchmarks.rnnt.prepared import FORMAT, PREPARE_COMMAND, SPLITS
from benchmarks.rnnt.raw import TRAIN_SUBSETS, VOCABULARY
from benchmarks.rnnt.speech_pipeline import SpeechPipeline
from benchmarks.rnnt.synthetic import generate
from benchmarks.rnnt.tokenizer import TranscriptTokenizer
from common.data import manifest
from common.data.commands import DataCommands
from common.data.manifest import Manifest, digest
from common.data.options import Option
from common.data.preparation import preparing
from common.data.published import Published
from common.errors import ConfigError

WORK = "intermediate"
LARGEST_VOCABULARY = 32_767
"""Maximum number of pieces, because they are stored in 16 bits."""
PUBLISHED = Published({"train_samples": 281_241, "eval_samples": 2_703, "vocabulary": VOCABULARY})
"""Utterances of the corpus's three training subsets and of dev-clean, and pieces of the benchmark's tokenizer."""


def prepare(
    raw_dir: Path,
    data_dir: Path,
    vocabulary: Annotated[int | None, Option("pieces of the tokenizer (1023, or the number in STAND_IN)")] = None,
    tokenizer: Annotated[Path | None, Option("file of a SentencePiece model (one is trained on the data)")] = None,
    train_subsets: Annotated[
        Sequence[str] | None, Option(f"subsets to use: some of {', '.join(TRAIN_SUBSETS)} (all)", metavar="SUBSET")
    ] = None,
    workers: int = 1,
) -> Manifest:
    """Write the prepared data set. Do nothing if it is complete, and resume an interrupted preparation.

    Args:
        raw_dir: folder with LibriSpeech's folders, as :mod:`benchmarks.rnnt.raw` describes them.
        train_subsets: LibriSpeech subsets for training. Fewer than all three are custom data.

    Raises:
        ConfigError: the vocabulary or a subset is impossible.
        DataError: the raw data are missing, damaged or of another kind; the disk is too small; ``data_dir`` holds
            data from another source or with other settings, or another process is preparing them.
    """
    source = raw.open_raw(raw_dir, train_subsets)
    pieces = raw.vocabulary_of(source) if vocabulary is None else vocabulary
    if not 1 <= pieces <= LARGEST_VOCABULARY:
        raise ConfigError(f"--vocabulary={pieces}: 1 to {LARGEST_VOCABULARY}")
    if tokenizer is not None:
        TranscriptTokenizer(tokenizer, pieces)  # checks the vocabulary before the work
    utterances = {split: source.utterances(split) for split in SPLITS}
    wanted = {
        "fingerprint": raw.fingerprint(utterance for split in SPLITS for utterance in utterances[split]),
        "settings": json.dumps(
            {"vocabulary": pieces, "tokenizer": "trained" if tokenizer is None else digest(tokenizer, "sha256")},
            sort_keys=True,
        ),
    }
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.stand_in) as job:
        if job.found is not None:
            return job.found
        files, counts = SpeechPipeline(utterances, data_dir, job.begin(WORK), pieces, tokenizer, workers).run()
        subsets = (*source.subsets["train"], *source.subsets["eval"])
        return job.finish(files, counts, f"LibriSpeech: {', '.join(subsets)}")


def verify(data_dir: Path) -> Manifest:
    """Check every checksum of ``data_dir``; raises :class:`DataError` at the first that differs."""
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)


def _remarks(made: Manifest, **options: Any) -> Iterator[str]:
    for split in SPLITS:
        samples, seconds = made.counts[f"{split}_samples"], made.counts[f"{split}_audio_samples"] / 16_000
        yield (
            f"{split}: {seconds / 3600:.2f} h, {seconds / samples:.2f} s an utterance, the longest "
            f"{made.counts[f'{split}_longest_samples'] / 16_000:.2f} s; "
            f"{made.counts[f'{split}_tokens'] / seconds:.2f} pieces a second"
        )


COMMANDS = DataCommands(
    "rnnt",
    raw="LibriSpeech's archives, or their content",
    prepared="prepared samples and word pieces",
    real="LibriSpeech",
    generate=generate,
    prepare=prepare,
    verify=verify,
    remarks=_remarks,
    published=PUBLISHED,
)
