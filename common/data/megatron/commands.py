"""The data commands of a workload that trains on a :class:`common.data.megatron.corpus.Corpus`."""

from __future__ import annotations

from pathlib import Path

from common.data.commands import DataCommands
from common.data.manifest import Manifest
from common.data.megatron import preparation
from common.data.megatron.corpus import Corpus
from common.data.megatron.synthetic import SyntheticText, generate


def commands_for(corpus: Corpus) -> DataCommands:
    """Return ``download``, ``generate``, ``prepare`` and ``verify`` for ``corpus``."""

    def generated(raw_dir: Path, options: SyntheticText) -> str:
        return generate(raw_dir, corpus, options)

    def prepared(raw_dir: Path, data_dir: Path, workers: int) -> Manifest:
        return preparation.prepare(raw_dir, data_dir, corpus, workers)

    def verified(data_dir: Path) -> Manifest:
        return preparation.verify(data_dir, corpus)

    return DataCommands(
        corpus.benchmark,
        raw="C4's text and the tokenizer, or pairs of .bin and .idx",
        prepared="pairs of .bin and .idx",
        real="C4",
        generate=generated,
        prepare=prepared,
        verify=verified,
        published=corpus.published,
    )
