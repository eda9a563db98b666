"""The data commands of a workload that trains on a :class:`common.data.megatron.corpus.Corpus`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from common.data.commands import DataCommands, cores, option
from common.data.manifest import Manifest
from common.data.megatron import preparation
from common.data.megatron.corpus import Corpus
from common.data.megatron.stand_in import Generated, Request, generate


def commands_for(corpus: Corpus) -> DataCommands:
    """Return ``download``, ``generate``, ``prepare`` and ``verify`` for ``corpus``."""

    def generated(raw_dir: Path, **sizes: Any) -> Generated:
        return generate(raw_dir, corpus, Request(**sizes))

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
        workers={"prepare": cores},
        options={
            "generate": tuple(
                option(
                    f"--{field.name.replace('_', '-')}",
                    type=int,
                    default=field.default,
                    help=f"(default {field.default})",
                )
                for field in dataclasses.fields(Request)
            )
        },
    )
